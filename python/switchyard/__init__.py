"""Expert parallelism for Mixture-of-Experts models."""
from ._activations import Activation
from ._library import (CommunicationError, DeviceError, Error, InternalError, InvalidArgument,
                       StorageError, Unsupported, library)

__version__ = library.switchyard_version().decode()
__all__ = ["Activation", "CommunicationError", "DeviceError", "Error", "InternalError",
           "InvalidArgument", "StorageError", "Unsupported", "__version__"]
