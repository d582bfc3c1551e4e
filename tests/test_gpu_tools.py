"""The kernels that tests on a GPU ask for by kind exist for their shapes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("humming_cutlass._C", reason="the extension is not built")

import gpu_scenarios
from gpu_tools import split_choice, workspace_choice
from humming_cutlass import planner, support, testing

DEVICES = [planner.Device(arch="sm_80", sm_count=108), planner.Device(arch="sm_90a", sm_count=132)]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
@pytest.mark.parametrize(("n", "k"), [(512, 4096), (4096, 4096), (gpu_scenarios.N, gpu_scenarios.K)])
def test_kernels_that_split(device: planner.Device, n: int, k: int) -> None:
    types = testing.make_types("int4", k=k, element_a="bfloat16", group_size=128)
    kinds = [(workspace_choice(types, 1, n, k, device), support.SM80)]
    if device.arch == "sm_90a":
        kinds.append((split_choice(types, 1, n, k, device, support.SM90), support.SM90))
    for choice, mainloop in kinds:
        assert choice.config.schedule.mainloop == mainloop
        assert 1 < choice.split_k <= 8
        assert support.check(choice.config) is None


def test_nothing_splits_a_short_k() -> None:
    types = testing.make_types("int4", k=128, element_a="bfloat16", group_size=128)
    with pytest.raises(AssertionError, match="nothing splits k 128"):
        workspace_choice(types, 1, 64, 128, DEVICES[0])


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
def test_scenarios_name_their_kernels(device: planner.Device) -> None:
    """What they launch is compiled before: the planner's kernels, and the one that sums in the workspace."""
    found = {config.name for config in gpu_scenarios.kernels(device)}
    for k, n, m in ((gpu_scenarios.K, gpu_scenarios.N, 1), (gpu_scenarios.K, gpu_scenarios.N, gpu_scenarios.MANY)):
        types = testing.make_types("int4", k=k, element_a="bfloat16", group_size=128)
        assert planner.choose(types, m, n, k, device).config.name in found
    types = testing.make_types("int4", k=256, element_a="bfloat16", group_size=128)
    assert planner.choose(types, 16, 256, 256, device).config.name in found
