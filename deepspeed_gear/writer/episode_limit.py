"""Episode limit: how many steps of an episode one trajectory holds, and what a longer one does."""

from __future__ import annotations

from typing import NamedTuple

from deepspeed_gear.errors import DataError


class EpisodeLimit(NamedTuple):
    """The longest trajectory of a table, and whether a longer episode may be stored as several.

    Args:
        max_length: Most steps of a trajectory; None: as many as fit.
        whole_fields: Names of the fields of a batch that are right in whole episodes only: the return-to-go
            of a part lacks the rewards that follow, and its time steps begin at 0 again.
    """

    max_length: int | None
    whole_fields: tuple[str, ...] = ()

    def check_parts(self, env: int) -> None:
        """Raise unless the episode of an environment may be stored as several trajectories.

        Raises:
            DataError: A field needs the whole episode.
        """
        if self.whole_fields:
            rule = (
                f"must have at most max_length = {self.max_length} steps, since field "
                f"{self.whole_fields[0]} needs whole episodes"
            )
            remedy = "raise gear.tables.<name>.max_length, or drop the episode by reset with a mask"
            raise DataError(f"the episode of environment {env}", rule, None, remedy)
