# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism for Mixture-of-Experts models."""
from ._activations import Activation
from ._arrays import Array, bfloat16, put
from ._checkpoint import (Checkpoint, CheckpointBlock, TensorInfo, load_checkpoint, read_header,
                          save_checkpoint)
from ._device import Device
from ._functions import (ExpertsGradients, MoeGradients, Plan, RouteGradients, Routing, combine,
                         combine_backward, dispatch, experts, experts_backward, moe, moe_backward,
                         plan, route, route_backward)
from ._layer import (LayerGradients, MoeLayer, MoeWeights, PickCounts, SavedForBackward, Sizing,
                     run_step)
from ._library import (CommunicationError, DeviceError, Error, InternalError, InvalidArgument,
                       StorageError, Unsupported, library)
from ._ranks import Communicator, ExpertPlacement, connect, reshard, run_ranks
from ._router import RouterForm
from ._verify import Comparison, verify

__version__ = library.switchyard_version().decode()
__all__ = ["Activation", "Array", "Checkpoint", "CheckpointBlock", "CommunicationError",
           "Communicator", "Comparison", "Device", "DeviceError", "Error", "ExpertPlacement",
           "ExpertsGradients", "InternalError", "InvalidArgument", "LayerGradients", "MoeGradients",
           "MoeLayer", "MoeWeights", "PickCounts", "Plan", "RouteGradients", "RouterForm",
           "Routing", "SavedForBackward", "Sizing", "StorageError", "TensorInfo", "Unsupported",
           "__version__", "bfloat16", "combine", "combine_backward", "connect", "dispatch",
           "experts", "experts_backward", "load_checkpoint", "moe", "moe_backward", "plan", "put",
           "read_header", "reshard", "route", "route_backward", "run_ranks", "run_step",
           "save_checkpoint", "verify"]
