"""Starting processes faster."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Look for cyclic garbage once, at the end, while the body imports what stays; later searches leave that out.

    Importing torch and vLLM sets off a dozen searches through all there is by then, which take seconds. For imports alone: an
    engine that was built this way decoded a twentieth slower.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
