"""Results of a run: JSON with the environment that made it, a table, a picture."""

from qat.report.environment import environment
from qat.report.plots import plot_accuracies
from qat.report.table import format_table

__all__ = ["environment", "format_table", "plot_accuracies"]
