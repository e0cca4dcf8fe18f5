"""The `gear` section of ds_config.json: its options and all checks on them."""

from deepspeed_gear.config.ds_batch_sizes import batch_sizes as batch_sizes
from deepspeed_gear.config.ds_batch_sizes import refuse_batch_sizes as refuse_batch_sizes
from deepspeed_gear.config.field_resolution import check_against as check_against
from deepspeed_gear.config.gear_config import GearConfig as GearConfig
from deepspeed_gear.config.gear_config import parse as parse
from deepspeed_gear.config.recipes import expand as expand
from deepspeed_gear.config.resolved_field import ResolvedField as ResolvedField
from deepspeed_gear.config.sampler_options import DrawingOptions as DrawingOptions
from deepspeed_gear.config.sampler_options import PriorityOptions as PriorityOptions
from deepspeed_gear.config.sampler_options import SamplerOptions as SamplerOptions
