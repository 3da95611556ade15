# SPDX-License-Identifier: Apache-2.0
# Installs the library into the Python package, as the component "python". pyproject.toml builds it.
set_property(TARGET switchyard PROPERTY VERSION)  # wheels have no symlinks: one file, one name
set_property(TARGET switchyard PROPERTY SOVERSION)
set_target_properties(switchyard PROPERTIES INSTALL_RPATH $ORIGIN INSTALL_RPATH_USE_LINK_PATH OFF)
install(TARGETS switchyard LIBRARY DESTINATION switchyard COMPONENT python EXCLUDE_FROM_ALL)
install(CODE "set(licences \"${SKBUILD_METADATA_DIR}/licenses\")" COMPONENT python EXCLUDE_FROM_ALL)
install(SCRIPT cmake/BundleLibraries.cmake COMPONENT python EXCLUDE_FROM_ALL)
