import numpy as np
import numpy.typing as npt

def attention_paths() -> tuple[str, ...]:
    """Names of the instruction-set paths that this CPU can run, fastest first."""

class PagedAttention:
    """Paged attention with its own threads; ``engine.attention.native`` says what it promises.

    Args:
        threads: How many compute, the caller included.
        path: One of ``attention_paths()``; empty means the fastest.

    Raises:
        ValueError: This CPU has no such path, or threads is not in [1, 1024].
    """

    def __init__(self, threads: int, path: str = "") -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def threads(self) -> int: ...
    def attend(
        self,
        out: int,
        query: int,
        key_pool: int,
        value_pool: int,
        query_starts: npt.NDArray[np.int32],
        context_lens: npt.NDArray[np.int32],
        pages: npt.NDArray[np.int32],
        tokens: int,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        num_pages: int,
        page_size: int,
        scale: float,
        bfloat16: bool,
    ) -> None:
        """Computes from addresses of contiguous memory, without the GIL.

        The caller vouches for what an address cannot tell: device, dtype, shape and stride.

        Raises:
            TypeError: An array is not int32 and C-contiguous.
            ValueError: Sizes do not fit together, or a page to be read is not in [0, num_pages); nothing was written.
        """
