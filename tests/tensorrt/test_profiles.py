import pytest

from qat.errors import EngineError, RunnerError
from qat.tensorrt.profiles import NetworkInput, ShapeRange, check_profiles, choose_profile, make_profiles, parse_shapes


def test_trtexec_spelling() -> None:
    assert parse_shapes("input:1x3x8x8,ids:2x128") == {"input": (1, 3, 8, 8), "ids": (2, 128)}
    assert parse_shapes("a::b:4") == {"a::b": (4,)}
    assert parse_shapes("scale:scalar") == {"scale": ()}


@pytest.mark.parametrize("spec", ["input", "input:1xax3", ":1x2", "a:1,a:2", "input:1X2"])
def test_unreadable_shapes_are_refused(spec) -> None:
    with pytest.raises(EngineError, match="name:1x3x224x224"):
        parse_shapes(spec)


def test_one_profile_for_each_triple() -> None:
    profiles = make_profiles(["x:1x8", "x:1x8"], ["x:1x8", "x:4x8"], ["x:1x8", "x:8x8"])
    assert profiles == [{"x": ShapeRange((1, 8), (1, 8), (1, 8))}, {"x": ShapeRange((1, 8), (4, 8), (8, 8))}]
    assert make_profiles([], ["x:4"], ["x:8"]) == [{"x": ShapeRange((4,), (4,), (8,))}]
    assert make_profiles([], [], []) == []


@pytest.mark.parametrize(
    "specs",
    [
        (["x:1"], ["x:1", "x:2"], []),
        (["x:1"], [], []),
        (["x:1"], ["y:1"], ["x:1"]),
        (["x:4"], ["x:2"], ["x:8"]),
        (["x:1"], ["x:2"], ["x:2x2"]),
    ],
)
def test_profiles_that_contradict_themselves_are_refused(specs) -> None:
    with pytest.raises(EngineError):
        make_profiles(*specs)


INPUTS = [NetworkInput("x", (-1, 3, 8)), NetworkInput("fixed", (4,))]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "dynamic"),
        (["y:1x3x8"], "unknown"),
        (["fixed:4"], "missing"),
        (["x:1x4x8"], "Fixed dimensions"),
        (["x:1x3"], "declares -1x3x8"),
    ],
)
def test_profiles_must_fit_the_network(specs, message) -> None:
    with pytest.raises(EngineError, match=message):
        check_profiles(INPUTS, make_profiles([], specs, []))


def test_fitting_profiles_pass() -> None:
    check_profiles(INPUTS, make_profiles(["x:1x3x8"], ["x:2x3x8"], ["x:9x3x8"]))
    check_profiles(INPUTS[1:], [])
    check_profiles([NetworkInput("size", (2,), is_shape_tensor=True)], make_profiles([], ["size:224x224"], []))


def test_the_closest_profile_is_chosen() -> None:
    profiles = make_profiles(["x:1x8", "x:1x8", "x:1x8"], ["x:1x8", "x:8x8", "x:32x8"], ["x:1x8", "x:16x8", "x:64x8"])
    chosen = [choose_profile(profiles, {"x": (batch, 8)}) for batch in (1, 2, 16, 17, 64)]
    assert chosen == [0, 1, 1, 2, 2]
    with pytest.raises(RunnerError, match=r"x 65x8.*profile 2: x 1x8 to 64x8"):
        choose_profile(profiles, {"x": (65, 8)})
    with pytest.raises(RunnerError, match="No profile"):
        choose_profile(profiles, {"x": (1,)})
