import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; run `pytest -m gpu` on one"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
