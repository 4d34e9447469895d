"""Which layers lose the accuracy, and which to leave float.

evaluations = Evaluations(model, evaluate, "sensitivity.json")     # model is calibrated, evaluate(model) -> metrics
ranking = rank_sensitivity(evaluations, "top1")                    # one evaluation a layer
proposal = propose(evaluations, ranking, "top1", target=76.0)      # the fewest float layers that reach 76.0
"""

from qat.sensitivity.coverage import Point, operation_shares, pareto
from qat.sensitivity.evaluations import Evaluations
from qat.sensitivity.proposal import Proposal, Step, propose
from qat.sensitivity.ranking import Ranking, Sensitivity, rank_sensitivity
from qat.sensitivity.scores import OutputScore
from qat.sensitivity.units import Unit, find_blocks, find_units

__all__ = [
    "Evaluations",
    "OutputScore",
    "Point",
    "Proposal",
    "Ranking",
    "Sensitivity",
    "Step",
    "Unit",
    "find_blocks",
    "find_units",
    "operation_shares",
    "pareto",
    "propose",
    "rank_sensitivity",
]
