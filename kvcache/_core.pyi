"""Types of the native module; its promises are in csrc/kvcache_module.cpp."""

import numpy as np
import numpy.typing as npt

_Ids = npt.NDArray[np.int32] | npt.NDArray[np.int64]

def fast_compare_key(x: _Ids, y: _Ids) -> int:
    """Length of the common prefix of two contiguous 1-D arrays, both int32 or both int64; TypeError otherwise."""

def compare_with(path_name: str, x: _Ids, y: _Ids) -> int:
    """``fast_compare_key`` by the named path, for tests; ValueError if this machine cannot run it."""

def compare_paths() -> list[str]:
    """Names of the paths that this machine can run, the preferred first."""
