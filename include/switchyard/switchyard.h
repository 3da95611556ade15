// SPDX-License-Identifier: Apache-2.0
// Switchyard: expert parallelism for Mixture-of-Experts models.
#pragma once

#include "switchyard/agreement.h"   // IWYU pragma: export
#include "switchyard/build_info.h"  // IWYU pragma: export
#include "switchyard/captured_graph.h"
#include "switchyard/checkpoint.h"      // IWYU pragma: export
#include "switchyard/communicator.h"    // IWYU pragma: export
#include "switchyard/convert.h"         // IWYU pragma: export
#include "switchyard/device.h"          // IWYU pragma: export
#include "switchyard/dispatcher.h"      // IWYU pragma: export
#include "switchyard/error.h"           // IWYU pragma: export
#include "switchyard/experts.h"         // IWYU pragma: export
#include "switchyard/load_balancer.h"   // IWYU pragma: export
#include "switchyard/local_plan.h"      // IWYU pragma: export
#include "switchyard/matmul.h"          // IWYU pragma: export
#include "switchyard/mesh.h"            // IWYU pragma: export
#include "switchyard/moe_layer.h"       // IWYU pragma: export
#include "switchyard/moe_parameters.h"  // IWYU pragma: export
#include "switchyard/parallelize.h"     // IWYU pragma: export
#include "switchyard/placement.h"       // IWYU pragma: export
#include "switchyard/plan.h"            // IWYU pragma: export
#include "switchyard/reshard.h"         // IWYU pragma: export
#include "switchyard/router.h"          // IWYU pragma: export
#include "switchyard/run_ranks.h"       // IWYU pragma: export
#include "switchyard/safetensors.h"     // IWYU pragma: export
#include "switchyard/sequence.h"        // IWYU pragma: export
#include "switchyard/sizing.h"          // IWYU pragma: export
#include "switchyard/tensor.h"          // IWYU pragma: export
