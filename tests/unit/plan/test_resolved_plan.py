"""The resolved plan continues with what its caller has parsed and compared."""

from deepspeed_gear.config import parse
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.plan.resolved_plan import resolve_plan

TABLE = {"capacity_steps": 9, "schema": {"columns": {"x": {"dtype": "float32"}}}}


def test_a_parsed_section_and_a_control_plane_are_used_as_they_are() -> None:
    config = parse({"batch_size": 2, "tables": {"main": TABLE}})
    control_plane = ControlPlane()
    plan = resolve_plan(config, control_plane, None, None, None)
    assert plan.config is config
    assert plan.control_plane is control_plane
    assert plan.group is None
