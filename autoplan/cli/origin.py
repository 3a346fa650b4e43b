"""What ``autoplan run plan.json`` needs beside the plan: which MODEL, on which cluster. One note of the document."""

from __future__ import annotations

from typing import Any

import msgspec

from autoplan.errors import PlanFileError
from autoplan.plans import PlanDocument
from autoplan.report.facts import ORIGIN_NOTE


class Origin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``model``: MODEL as ``autoplan.models.load`` takes it. ``cluster``: ``Cluster.to_dict()``."""

    model: str
    cluster: dict[str, Any]


def with_origin(document: PlanDocument, origin: Origin) -> PlanDocument:
    others = tuple(note for note in document.notes if not note.startswith(ORIGIN_NOTE))
    note = ORIGIN_NOTE + msgspec.json.encode(origin).decode()
    return msgspec.structs.replace(document, notes=(*others, note))


def origin_of(document: PlanDocument) -> Origin | None:
    """None for a plan that was not made by the command line. Raises PlanFileError if the note is damaged."""
    for note in document.notes:
        if note.startswith(ORIGIN_NOTE):
            try:
                return msgspec.json.decode(note.removeprefix(ORIGIN_NOTE), type=Origin)
            except msgspec.MsgspecError as error:
                raise PlanFileError(f"the plan's note on its model is damaged ({error}); plan again") from None
    return None
