"""OpenRLHF's policy over a table, on two ranks, against the same policy with its own buffer.

Its trainer, actor, strategy, loss and options are the installed package's. flash-attn and vllm have
no build without a GPU: files with the imported names take their place, and nothing of them is
called. Where OpenRLHF asks for the CUDA device, it gets the CPU.
"""

import importlib.util
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine_parts import flat_weights
from gear_support import prefix, shared_files
from process_support import call_on_ranks, environment

from deepspeed_gear.errors import ConfigError, DataError, StoreError

HAS_OPENRLHF = all(importlib.util.find_spec(name) for name in ("openrlhf", "ray", "transformers"))
pytestmark = [
    pytest.mark.skipif(not HAS_OPENRLHF, reason="openrlhf is not installed"),
    pytest.mark.timeout(3600),
]
RANKS = 2
COUNT = 16
RATE = 0.5
# The names that OpenRLHF imports from packages without a build for CPUs.
ABSENT = {
    "flash_attn/__init__.py": "",
    "flash_attn/bert_padding.py": "index_first_axis = pad_input = rearrange = unpad_input = None",
    "flash_attn/utils/__init__.py": "",
    "flash_attn/utils/distributed.py": "all_gather = None",
    "vllm/__init__.py": "",
    "vllm/inputs.py": "TokensPrompt = None",
    "vllm/utils.py": "random_uuid = None",
}
CASES: dict[str, list[str]] = {
    "token": [],
    "sequence": ["--actor.loss_agg_mode", "seq-mean-token-mean"],
    "kl": ["--algo.kl.use_loss", "--algo.kl.init_coef", "0.1", "--actor.entropy_coef", "0.01"],
    "correction": ["--algo.advantage.is_correction_level", "token"],
}
# Means over samples. Others of the log are weighted by micro batch, and depend on the packs.
EQUAL = {"reward", "return", "response_length", "total_length", "truncated", "actor_lr"}
# The driver's part of OpenRLHF's program: an actor of Ray that starts to make its model.
STARTED = """
import sys
from types import SimpleNamespace
import ray
from openrlhf.trainer.ray import ppo_actor
from deepspeed_gear.integrations.openrlhf import policy_actor

made = policy_actor(ppo_actor.PolicyModelActor, {"tables": {}})
options = {"include_dashboard": False, "log_to_driver": False, "_temp_dir": sys.argv[1]}
ray.init(num_cpus=1, num_gpus=1, **options)
actor = made.options(num_cpus=1, num_gpus=1).remote(1, 0, None, None)
print(ray.get(actor.get_master_addr_port.remote()))
args = SimpleNamespace(train=SimpleNamespace(dynamic_batch_enable=False), ds=SimpleNamespace())
try:
    ray.get(actor.init_model_from_pretrained.remote(SimpleNamespace(args=args), "model"))
except Exception as error:
    print(error)
ray.shutdown()
"""
Run = tuple[dict[str, float], np.ndarray]  # what the policy has logged, and its weights


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment in which OpenRLHF can be imported."""
    absent = tmp_path_factory.mktemp("absent")
    for name, text in ABSENT.items():
        file = absent / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    path = os.pathsep.join([environment()["PYTHONPATH"], str(absent)])
    return {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, env: dict[str, str]) -> dict[str, Any]:
    """Train on two ranks; what the first one returns, by run."""
    out = tmp_path_factory.mktemp("openrlhf")
    first, second = call_on_ranks(RANKS, train_all, out, timeout_s=3600.0, **env)
    assert shared_files(prefix()) == []
    for name in [*CASES, "packs"]:
        for one, other in zip(first[name], second[name], strict=True):
            assert (one[1] == other[1]).all(), name
    return dict(first)


@pytest.mark.parametrize("case", CASES)
def test_a_table_trains_as_the_replay_buffer_does(ran: dict[str, Any], case: str) -> None:
    """Two epochs of SGD, so that the second one has ratios: the same weights, and the same log.

    OpenRLHF's own buffer is used without ZeRO, and the table with ZeRO 2: see the next test.
    """
    own, table = ran[case]
    change = np.abs(own[1] - ran["begin"]).max()
    assert change > 1e-3
    assert np.abs(own[1] - table[1]).max() < 1e-4 * change
    assert own[0].keys() == table[0].keys()
    for name in EQUAL:
        assert table[0][name] == pytest.approx(own[0][name], rel=1e-4, abs=1e-6), name


def test_zero_sums_the_micro_batches_of_a_step_with_a_table_alone(ran: dict[str, Any]) -> None:
    """OpenRLHF#1131: its own steps with ZeRO 1 and 2 keep the gradient of the last micro batch."""
    whole = ran["token"][0][1] - ran["begin"]
    for stage, (own, table) in ran["zero"].items():
        assert np.abs(own - ran["begin"] - whole).max() > 0.1 * np.abs(whole).max(), stage
        assert np.abs(table - ran["begin"] - whole).max() < 1e-4 * np.abs(whole).max(), stage


def test_16_bits_train_as_32_do(ran: dict[str, Any]) -> None:
    change = ran["one epoch"] - ran["begin"]
    rounded = ran["bf16"] - ran["begin"]
    assert np.linalg.norm(rounded - change) < 2**-4 * np.linalg.norm(change)


def test_packs_without_trajectories_change_no_weight(ran: dict[str, Any]) -> None:
    """Three trajectories in four packs, and in two."""
    (_, narrow), (_, wide) = ran["packs"]
    change = np.abs(wide - ran["begin"]).max()
    assert change > 1e-3
    assert np.abs(narrow - wide).max() < 1e-4 * change
    assert all(np.isfinite(value) for value in ran["packs"][0][0].values())


def test_a_checkpoint_holds_the_experience(ran: dict[str, Any]) -> None:
    """Experience that may be sampled twice is there after a load, and is trained as without one."""
    whole, rest = ran["resumed"]
    assert ran["stored"] == COUNT
    np.testing.assert_allclose(rest, whole, atol=1e-6)


def test_too_little_experience_waits_for_more(ran: dict[str, Any]) -> None:
    assert ran["too few"] == {}


def test_wrong_experience_is_refused(ran: dict[str, Any]) -> None:
    starts = {
        "no advantages": "experience.advantages must be there",
        "images": "experience must be text alone",
        "padding on the left": "experience.attention_mask must have no padding before its last",
        "other actions": "experience.action_mask must have one action for each of the 5 tokens",
        "text in the log": "experience.info['note'] must be one number for each sample",
        "order": "replay buffer must be read in order, 0 next",
    }
    assert ran["errors"].keys() == starts.keys()
    for name, start in starts.items():
        assert ran["errors"][name].startswith(start), name


def test_the_command_line_starts_the_policy_with_a_table(ran: dict[str, Any]) -> None:
    """The program of docs/how-to/openrlhf.md, up to the first actor."""
    assert ran["class"] == "GearPolicyModelActor"


def test_ray_starts_the_policy(env: dict[str, str]) -> None:
    """The class is sent to a worker of Ray, which refuses an option before it makes a model."""
    alone = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # short: Ray makes sockets in it
        command = [sys.executable, "-c", STARTED, folder]
        whole = environment(**env, **alone)
        done = subprocess.run(command, env=whole, capture_output=True, text=True, check=True)
    assert "ConfigError: --train.dynamic_batch_enable must be on" in done.stdout


# ---- on each rank --------------------------------------------------------------------------------


class Device(str):
    """The CPU, which OpenRLHF formats as the number of a CUDA device."""

    def __format__(self, spec: str) -> str:
        return "0"


def use_cpu() -> None:
    """Let OpenRLHF's code for CUDA run on CPUs, in float32."""
    import openrlhf.utils.deepspeed.deepspeed as strategies
    import openrlhf.utils.utils as utils

    device = Device("cpu")
    cuda: Any = torch.cuda
    cuda.current_device = lambda: device
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(cuda, name, lambda *_: None)
    make_mesh = strategies.init_device_mesh
    strategies.init_device_mesh = lambda _, *shape, **names: make_mesh("cpu", *shape, **names)
    utils.convert_to_torch_dtype = lambda _: torch.float32


def use_dtype(args: Any, dtype: torch.dtype) -> None:
    """Let OpenRLHF make policies of these options with weights of a dtype, of 32 bits as well."""
    import openrlhf.utils.utils as utils

    args.ds.param_dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    utils.convert_to_torch_dtype = lambda _: dtype


def options(out: Path, *more: str, stage: str = "2") -> Any:
    """Return the options that OpenRLHF's own command line makes of these."""
    import openrlhf.utils
    import ray

    words = ["--actor.model_name_or_path", str(out / "model"), "--ds.zero_stage", stage]
    words += ["--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "64"]
    words += ["--train.batch_size", str(COUNT), "--train.max_epochs", "2"]
    words += ["--rollout.batch_size", "4", "--rollout.n_samples_per_prompt", "4"]
    words += ["--rollout.micro_batch_size", "4", "--vllm.num_engines", "1"]
    words += ["--actor.num_gpus_per_node", str(RANKS), "--ckpt.path", str(out / "saved")]
    words += ["--algo.advantage.estimator", "group_norm", "--reward.remote_url", "none"]
    words += ["--actor.lr_warmup_ratio", "0", "--vllm.sync_backend", "gloo", *more]
    captured: list[Any] = []

    def capture(args: Any) -> None:
        captured.append(args)
        captured.append(sys._getframe(1).f_globals["PolicyModelActor"])
        raise KeyboardInterrupt

    patched = {(ray, "is_initialized"): lambda: True, (openrlhf.utils, "get_strategy"): capture}
    before = {key: getattr(*key) for key in patched}
    argv = sys.argv
    try:
        for (module, name), value in patched.items():
            setattr(module, name, value)
        sys.argv = ["train_ppo_ray", *words]
        runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
    except KeyboardInterrupt:
        pass
    finally:
        sys.argv = argv
        for (module, name), value in before.items():
            setattr(module, name, value)
    args, policy = captured
    args.ds.packing_samples = False  # unpads with flash-attn
    args.ds.attn_implementation = "eager"
    args.ds.param_dtype = "fp32"
    args.policy_class = policy
    return args


def experience(first: int, count: int, width: int = 20) -> list[Any]:
    """Return samples of the numbers from `first` on, in batches of four."""
    from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch

    items = []
    for number in range(first, first + count):
        words = torch.Generator().manual_seed(number)
        prompt = 2 + number % 5
        length = prompt + 1 + int(torch.randint(width, (), generator=words))
        tokens = torch.randint(2, 28, (length,), generator=words)
        mask = torch.arange(1, length) >= prompt
        if number % 7 == 3:
            mask[:] = False  # overlong, say: nothing of it is learned
            mask[-1] = number % 2 == 0
        rows = torch.randn(4, length - 1, generator=words) * mask
        reward = torch.tensor(float(number % 3))
        info = {"reward": reward, "kl": rows[3].sum(), "return": reward}
        items.append(
            Experience(
                sequences=tokens,
                attention_mask=torch.ones(length, dtype=torch.long),
                action_mask=mask,
                action_log_probs=-3 + 0.1 * rows[0],
                base_action_log_probs=-3 + 0.1 * rows[1],
                rollout_log_probs=-3 + 0.1 * rows[2],
                advantages=rows[3],
                rewards=reward,
                response_length=mask.sum(),
                total_length=torch.tensor(length),
                truncated=torch.tensor(number % 2 == 0),
                info=info,
            )
        )
    return [make_experience_batch(items[at : at + 4]) for at in range(0, count, 4)]


def policy(out: Path, section: dict[str, Any] | None, args: Any) -> Any:
    """Return OpenRLHF's policy on this rank; with a section, over its table."""
    from openrlhf.trainer.ray.ppo_actor import PolicyModelActor
    from openrlhf.utils import get_strategy

    from deepspeed_gear.integrations.openrlhf import policy_actor

    made = PolicyModelActor if section is None else policy_actor(PolicyModelActor, section)
    plain = made.__ray_metadata__.modified_class
    rank = dist.get_rank()
    actor = plain(RANKS, rank, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    strategy = get_strategy(args)
    make = strategy.get_ds_train_config

    def with_sgd(*arguments: Any, **given: Any) -> dict[str, Any]:
        config = make(*arguments, **given)
        config["zero_allow_untested_optimizer"] = True
        config["gradient_clipping"] = 0.0
        return {**config, "optimizer": {"type": "SGD", "params": {"lr": RATE}}}

    strategy.get_ds_train_config = with_sgd
    actor.init_model_from_pretrained(strategy, str(out / "model"), 1000)
    return actor


def section(tokens: int = 64, **more: Any) -> dict[str, Any]:
    table = {"capacity_trajectories": 64, "capacity_steps": 4096, "max_length": 32}
    shared = {"shared_memory": {"prefix": prefix()}, "pack": {"tokens": tokens}}
    return {"tables": {"rollouts": {**table, **more}}, **shared}


def add(actor: Any, counts: tuple[int, int] = (COUNT // 2, COUNT // 2)) -> None:
    rank = dist.get_rank()
    for batch in experience(sum(counts[:rank]), counts[rank]):
        actor.append(batch)


def run(actor: Any, kl: float = 0.1, fits: int = 1) -> Run:
    for _ in range(fits):
        status = actor.fit(kl)
    weights = flat_weights(actor.actor.model.module)
    return {name: float(value) for name, value in status.items()}, weights


def ended(actor: Any, result: Any) -> Any:
    actor.actor.model.destroy()
    return result


def train_all(out: Path) -> dict[str, Any]:
    """Run every case; return its results by name."""
    use_cpu()
    if dist.get_rank() == 0:
        save_model(out / "model")
    dist.barrier()
    found: dict[str, Any] = {}
    for case, words in CASES.items():
        runs = []
        for given, stage in ((None, "0"), (section(), "2")):
            actor = policy(out, given, options(out, *words, stage=stage))
            found.setdefault("begin", flat_weights(actor.actor.model.module))
            add(actor)
            runs.append(ended(actor, run(actor)))
        found[case] = runs
    found["zero"] = {}
    for stage in ("1", "2"):
        pair = []
        for given in (None, section()):
            actor = policy(out, given, options(out, stage=stage))
            add(actor)
            pair.append(ended(actor, run(actor))[1])
        found["zero"][stage] = pair
    for name, dtype in (("one epoch", torch.float32), ("bf16", torch.bfloat16)):
        args = options(out, "--train.max_epochs", "1")
        use_dtype(args, dtype)
        actor = policy(out, section(), args)
        add(actor)
        found[name] = ended(actor, run(actor))[1]
    use_dtype(args, torch.float32)
    found["packs"] = []
    for tokens in (32, 128):
        args = options(out, "--train.batch_size", "3")
        actor = policy(out, section(tokens) | {"rollout": {"trajectories": 3}}, args)
        add(actor, (2, 1))
        found["packs"].append(ended(actor, run(actor)))
    found.update(resumed(out))
    found["errors"] = errors(out)
    found["class"] = started_class(out)
    return found


def resumed(out: Path) -> dict[str, Any]:
    """Train experience twice, without and with a load between."""
    twice = section(max_times_sampled=2)
    actor = policy(out, twice, options(out))
    empty = actor.fit(0.0)
    add(actor)
    actor.fit(0.0)
    actor.save_checkpoint("one")
    whole = ended(actor, run(actor))[1]
    actor = policy(out, twice, options(out, "--ckpt.load_enable"))
    stored = len(actor.actor.model.gear)
    rest = ended(actor, run(actor))[1]
    return {"too few": empty, "stored": stored, "resumed": (whole, rest)}


def errors(out: Path) -> dict[str, str]:
    """Return the first words of the error of each wrong experience."""
    actor = policy(out, section(), options(out))
    buffer = actor.trainer.replay_buffer

    def wrong(**fields: Any) -> Callable[[], None]:
        return lambda: buffer.append(with_fields(**fields))

    def with_fields(**fields: Any) -> Any:
        (batch,) = experience(0, 1)
        for name in ("sequences", "attention_mask"):
            setattr(batch, name, torch.ones(1, 5, dtype=torch.long))
        for name in ("action_mask", "action_log_probs", "advantages"):
            setattr(batch, name, torch.ones(1, 4))
        batch.base_action_log_probs = batch.rollout_log_probs = None
        for name, value in fields.items():
            setattr(batch, name, value)
        return batch

    calls: dict[str, Callable[[], Any]] = {
        "no advantages": wrong(advantages=None),
        "images": wrong(mm_train_inputs=[{"pixel_values": torch.ones(1)}]),
        "padding on the left": wrong(attention_mask=torch.tensor([[0, 1, 1, 1, 1]])),
        "other actions": wrong(
            **{name: torch.ones(1, 5) for name in ("action_mask", "action_log_probs", "advantages")}
        ),
        "text in the log": wrong(info={"note": ["good"]}),
        "order": lambda: buffer[1],
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises((DataError, StoreError)) as raised:
            call()
        found[name] = str(raised.value)
    assert len(actor.actor.model.gear) == 0  # nothing of what was refused
    dist.barrier()
    add(actor)
    ended(actor, None)
    args = options(out)
    args.train.dynamic_batch_enable = False
    with pytest.raises(ConfigError, match=r"--train\.dynamic_batch_enable must be on"):
        policy(out, section(), args)
    return found


def started_class(out: Path) -> str:
    """Return the name of the class that the command line would start."""
    from openrlhf.trainer.ray import ppo_actor

    from deepspeed_gear.integrations.openrlhf import policy_actor

    before = ppo_actor.PolicyModelActor
    ppo_actor.PolicyModelActor = policy_actor(before, section())
    try:
        made = options(out).policy_class
    finally:
        ppo_actor.PolicyModelActor = before
    return str(made.__ray_metadata__.modified_class.__name__)


def save_model(folder: Path) -> None:
    """Save a small model with random weights, and a tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = {
        word: number for number, word in enumerate(["<pad>", "<eos>", *map(chr, range(97, 123))])
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    special = {"pad_token": "<pad>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(words),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
            eos_token_id=1,
        )
    ).save_pretrained(folder)
