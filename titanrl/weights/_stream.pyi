import numpy as np
import numpy.typing as npt

def run(table: npt.NDArray[np.int64]) -> None: ...
