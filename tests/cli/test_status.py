"""`status` warns where nothing can be learnt."""

from pathlib import Path

import pytest

from openclaw_rl.journal import Journal
from openclaw_rl.settings import Config, DataConfig
from openclaw_rl.status import read_status
from openclaw_rl.topk import TopK
from tests.journal.build import record


@pytest.mark.parametrize("blind", [10, 20])
def test_an_engine_without_candidates_is_told(tmp_path: Path, blind: int):
    config = Config(data=DataConfig(path=str(tmp_path)))
    with Journal.open(config.journal_path) as journal:
        for n in range(25):
            rows = 0 if n < blind else 3
            journal.record_turn(record(f"t{n}", topk=TopK([[5]] * rows, [[-1.0]] * rows)))
    told = [words for words in read_status(config)["warnings"] if "candidates" in words]
    assert [words.split()[0] for words in told] == (["20"] if blind == 20 else [])
