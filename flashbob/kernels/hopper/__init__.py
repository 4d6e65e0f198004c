"""The kernels for Hopper (compute capability 9.0), in Gluon. `able` tells which calls they take in place of the plain ones."""

from .backward import backward_keys, backward_rows
from .common import able
from .passes import column_pass, row_pass

__all__ = ["able", "backward_keys", "backward_rows", "column_pass", "row_pass"]
