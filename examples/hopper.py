"""Train a Decision Transformer on Hopper data with a `gear` section, on any number of ranks.

    gear ingest examples/data/hopper_expert.hdf5 data/hopper
    deepspeed --num_gpus 2 examples/hopper.py --config configs/hopper.json

examples/offline_run.py describes what it writes.
"""

from __future__ import annotations

from functools import partial

from common import config_of, context_of, masked_mean, shorten_history, squared_error
from decision_transformer import DecisionTransformer
from evaluate import episodes_of
from offline_run import OfflineRun, parser
from torch import Tensor

from deepspeed_gear import Batch


def main() -> None:
    options = parser(__doc__, "hopper")
    options.add_argument(
        "--target", type=float, nargs="+", default=[3600.0], help="returns to ask for"
    )
    options.add_argument(
        "--behaviour-cloning", action="store_true", help="hide the return from the model"
    )
    args = options.parse_args()
    config, steps = config_of(args)
    context = context_of(config)
    model = DecisionTransformer(
        observation_size=11,
        action_size=3,
        context=context,
        has_goal="goal" in config["gear"]["fields"],
        sees_return=not args.behaviour_cloning,
    )
    run = OfflineRun(model, config, args, steps, goal=args.target[0])
    run.engine.gear.transform = shorten_history
    play = partial(episodes_of, context=context, normalizer=run.engine.gear.normalizer)

    def loss_of(batch: Batch) -> Tensor:
        real = batch.mask["action"]
        return masked_mean(squared_error(run.engine(batch, real), batch["action"]), real)

    run.train(loss_of, partial(play, target=args.target[0]))
    others = {
        f"{target:.0f}": run.evaluate(partial(play, target=target))[0] for target in args.target[1:]
    }
    returns = {f"{args.target[0]:.0f}": run.record.returns[-1][1], **others}
    run.finish("squared error of actions", returns=returns)


if __name__ == "__main__":
    main()
