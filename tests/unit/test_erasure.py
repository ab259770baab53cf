"""Erasure on the in-memory store: all that names a conversation goes, nothing else does, whenever it is killed."""

from __future__ import annotations

import copy
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.crashing_store import Crash, CrashPoint, crashing
from tests.fakes.memory_store import MemoryStore
from tests.support.erasing import DRAFT, NOW, SEED, SUBJECTS, add_late, eraser, filled, harvest, leaks
from tests.support.spooled import START, TARGET, WINDOW_S, add_segment, add_shard, harvester_of, truncate
from tests.support.tiny import tiny_draft
from tide.config import Policy
from tide.domain import DraftModel, Erasure, ErasureDone, LineageRecord, WindowManifest
from tide.erasure.erase import ErasureResult
from tide.erasure.scan import Subjects, scan
from tide.errors import BadInputError, ConfigError, Conflict, Gone, NotFound, SpoolBusy
from tide.lineage import ledger, provenance
from tide.lineage.history_text import mermaid, tree
from tide.models import candidates
from tide.models.draft_files import load_draft
from tide.reproduce import reproduce, why_gone
from tide.states import snapshots, spool
from tide.states.shards import ShardReader, read_manifest

STATES, DRAFTS = "svc-states", "svc-drafts"
W1 = spool.window_of(START, WINDOW_S)


@pytest.fixture
def store(tmp_path: Path) -> MemoryStore:
    store = MemoryStore()
    filled(store, STATES, DRAFTS, tmp_path / "spool")
    return store


def erase(store: MemoryStore, root: Path, subjects: Subjects = SUBJECTS, *, dry_run: bool = False) -> ErasureResult:
    return eraser(store, STATES, DRAFTS, root).run(subjects, dry_run=dry_run)


def tree_of(store: MemoryStore, ref: str = "main") -> dict[str, bytes]:
    return {o.path: store.read(STATES, ref, o.path) for o in store.list(STATES, ref)}


def requests_on_main(store: MemoryStore) -> list[str]:
    shards = snapshots.manifests(store, STATES, "main", "train", "held_out")
    return sorted(r.request[-1] for _, shard in shards for r in shard.requests)


def test_the_conversation_leaves_main_and_everything_else_stays(store: MemoryStore, tmp_path: Path) -> None:
    assert requests_on_main(store) == ["1", "2", "2", "3", "4", "5"]
    before = {path: data for path, data in tree_of(store).items() if W1 not in path}
    result = erase(store, tmp_path)
    assert requests_on_main(store) == ["1", "3", "4", "5"]
    assert {path: data for path, data in tree_of(store).items() if W1 not in path} == before
    assert result.live_objects == 3
    manifest = WindowManifest.model_validate_json(store.read(STATES, "main", f"windows/{W1}/r0/manifest.json"))
    assert (manifest.rows, manifest.requests) == (72, 3)
    stored = [Path(o.path).stem for o in store.list(STATES, "main", f"windows/{W1}/") if o.path.endswith("tensors")]
    assert sorted(stored) == sorted(manifest.shards)


def test_the_rows_of_others_are_the_same_tensors_as_before(store: MemoryStore, tmp_path: Path) -> None:
    def rows(folder: Path) -> dict[str, list[bytes]]:
        found = snapshots.manifests(store, STATES, "main", "train")
        read = {}
        for path in snapshots.fetch(store, STATES, "main", found, folder):
            with ShardReader(path) as reader:
                for s in reader:
                    parts = (s.input_ids, s.aux_hidden.float(), s.last_hidden.float())
                    read[s.info.request] = [p.numpy().tobytes() for p in parts]
        return read

    before = rows(tmp_path / "before")
    erase(store, tmp_path)
    after = rows(tmp_path / "after")
    assert after == {request: data for request, data in before.items() if request != f"{SEED:064x}"}


def test_no_byte_of_it_is_left_and_every_older_ref_answers_gone(store: MemoryStore, tmp_path: Path) -> None:
    store.tag(STATES, "then", "main")
    assert set(leaks(store.blocks(STATES))) > {"token ids"}
    held = {(h.commit, o.path) for h in scan(store, STATES, SUBJECTS).holdings for o in h.objects}
    erase(store, tmp_path)
    assert leaks(store.blocks(STATES)) == []
    gone = set()
    for ref in [c.id for c in store.log(STATES, "main")]:
        for item in store.list(STATES, ref):
            try:
                store.read(STATES, ref, item.path)
            except Gone:
                gone.add((ref, item.path))
    assert held <= gone
    with pytest.raises(Gone):
        tree_of(store, "then")
    assert leaks(store.blocks(STATES), seed=1) != []


def test_the_record_says_what_was_lost_with_it_and_has_no_content(store: MemoryStore, tmp_path: Path) -> None:
    log = [c.id for c in store.log(STATES, "main")]
    erase(store, tmp_path)
    [record] = ledger.every(store, DRAFTS, ledger.ERASURE, Erasure)
    [done] = ledger.every(store, DRAFTS, ledger.ERASED, ErasureDone)
    assert (record.conversations, record.requests) == (SUBJECTS.conversations, ())
    assert (record.erased_requests, record.other_requests, record.rows) == (1, 2, 96)
    assert record.drafts == (DRAFT,)
    assert (done.erasure, done.objects) == (record.digest(), len(record.objects))
    assert set(log) - set(record.commits) == {log[-1]}, "all but the first, empty commit had rows of it"
    kinds = [LineageRecord.from_metadata(c.metadata) for c in store.log(STATES, "main") if c.id not in log]
    assert [(k.kind, k.subject) for k in kinds if k] == [("erasure", SUBJECTS.id)] * 2


def test_a_commit_from_before_the_conversation_is_not_called_lost(tmp_path: Path) -> None:
    store = MemoryStore()
    add_shard(tmp_path / "spool", 1)
    harvest(store, STATES, tmp_path / "spool")
    before = store.head(STATES, "main").id
    add_late(tmp_path / "spool")
    harvest(store, STATES, tmp_path / "spool")
    erase(store, tmp_path)
    [record] = ledger.every(store, DRAFTS, ledger.ERASURE, Erasure)
    assert before not in record.commits
    assert tree_of(store, before)


def test_what_an_earlier_rewrite_left_in_history_is_erased_too(store: MemoryStore, tmp_path: Path) -> None:
    """The shard of 1, 2 and 3 is first rewritten for 3: two old versions hold 2."""
    erase(store, tmp_path, Subjects(requests=(f"{3:064x}",)))
    result = erase(store, tmp_path)
    assert leaks(store.blocks(STATES)) == leaks(store.blocks(STATES), seed=3) == []
    assert requests_on_main(store) == ["1", "4", "5"]
    assert len(ledger.every(store, DRAFTS, ledger.ERASURE, Erasure)) == 2
    assert result.id != Subjects(requests=(f"{3:064x}",)).id


def test_one_request_goes_and_its_conversation_stays(store: MemoryStore, tmp_path: Path) -> None:
    erase(store, tmp_path, Subjects(requests=(f"{1:064x}",)))
    assert requests_on_main(store) == ["2", "2", "3", "4", "5"]


def test_a_dry_run_says_the_same_and_changes_nothing(store: MemoryStore, tmp_path: Path) -> None:
    add_late(tmp_path / "spool")
    before = (tree_of(store), len(store.blocks(STATES)), sorted((tmp_path / "spool").rglob("*")))
    planned = erase(store, tmp_path, dry_run=True)
    assert (tree_of(store), len(store.blocks(STATES)), sorted((tmp_path / "spool").rglob("*"))) == before
    assert ledger.every(store, DRAFTS, ledger.ERASURE, Erasure) == []
    assert {o.address for o in planned.erasures[0].objects} == {
        o.address for o in erase(store, tmp_path).erasures[0].objects
    }


def test_again_is_harmless_and_an_unknown_id_is_an_error(store: MemoryStore, tmp_path: Path) -> None:
    first = erase(store, tmp_path)
    tree, number = tree_of(store), len(list(store.log(STATES, "main")))
    assert erase(store, tmp_path).erasures == first.erasures
    assert (tree_of(store), len(list(store.log(STATES, "main")))) == (tree, number)
    with pytest.raises(NotFound, match="TIDE_HASH_KEY"):
        erase(store, tmp_path, Subjects(conversations=("ffffffff",)))


def test_rows_that_come_in_later_are_erased_by_another_run(store: MemoryStore, tmp_path: Path) -> None:
    erase(store, tmp_path)
    add_shard(tmp_path / "spool", SEED, 6, at=START + 250)
    harvest(store, STATES, tmp_path / "spool")
    erase(store, tmp_path)
    assert leaks(store.blocks(STATES)) == []
    assert len(ledger.every(store, DRAFTS, ledger.ERASURE, Erasure)) == 2


def test_the_spool_is_cleaned_of_it_and_the_harvest_takes_the_rest(store: MemoryStore, tmp_path: Path) -> None:
    spooled = tmp_path / "spool"
    add_shard(spooled, SEED, 6, at=START + WINDOW_S + 20)
    add_segment(spooled, SEED, 6, at=START + WINDOW_S + 21)
    add_shard(spooled, SEED, at=NOW + 10_000)
    result = erase(store, tmp_path)
    assert len(result.spool.rewritten) == 3
    assert leaks(p.read_bytes() for p in spooled.rglob("*") if p.is_file()) == []
    harvest(store, STATES, spooled, NOW + 20_000)
    assert requests_on_main(store) == ["1", "3", "4", "5", "6"]
    assert leaks(store.blocks(STATES)) == []


def test_a_harvest_of_another_host_brings_nothing_back_and_takes_what_came_after(
    store: MemoryStore, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    add_shard(elsewhere, SEED, 6, at=START + WINDOW_S + 20)
    add_segment(elsewhere, SEED, 6, at=START + WINDOW_S + 21)
    erase(store, tmp_path)
    erased = ledger.every(store, DRAFTS, ledger.ERASURE, Erasure)
    replace(harvester_of(store, elsewhere, STATES, "r1"), erased=erased).run(NOW)
    assert requests_on_main(store) == ["1", "3", "4", "5", "6"]
    assert leaks(store.blocks(STATES)) == []
    add_shard(elsewhere, SEED, at=erased[0].at + 5)  # opened at the erasure: the person came back
    replace(harvester_of(store, elsewhere, STATES, "r1"), erased=erased).run(erased[0].at + WINDOW_S)
    assert requests_on_main(store) == ["1", "2", "3", "4", "5", "6"]


def test_quarantined_files_of_it_go_and_those_that_do_not_say_are_named(store: MemoryStore, tmp_path: Path) -> None:
    spooled = tmp_path / "spool"
    truncate(spooled / "train" / add_shard(spooled, SEED, at=START + 30).file)
    mute = add_shard(spooled, 9, at=START + 31)
    (spooled / "train" / f"{mute.name}.json").write_text("{}")
    harvest(store, STATES, spooled)
    result = erase(store, tmp_path)
    assert leaks(p.read_bytes() for p in (spooled / "quarantine").glob("*")) == []
    assert [Path(p).name for p in result.spool.unreadable] == [mute.file]


def test_downloads_of_touched_shards_go_and_others_stay(store: MemoryStore, tmp_path: Path) -> None:
    cache = tmp_path / "home" / "cache"
    shards = snapshots.fetch(
        store, STATES, "main", snapshots.manifests(store, STATES, "main", "train"), cache / "train"
    )
    snapshots.fetch_request_tables(store, STATES, "main", cache / "requests")
    scratch = tmp_path / "home" / "train" / "abc"
    scratch.mkdir(parents=True)
    (scratch / "data_0.ckpt").write_bytes(b"samples")
    for path in (scratch / "data_0.ckpt", scratch):
        os.utime(path, (1.0, 1.0))
    own = [p for p in shards if f"{SEED:08x}" in {r.conversation for r in read_manifest(p).requests}]
    result = erase(store, tmp_path)
    assert [p.exists() for p in own] == [False, False]
    assert [p.exists() for p in shards if p not in own] == [True]
    assert [p.name.startswith(W1) for p in (cache / "requests").iterdir()] == [False]
    assert (result.downloads.busy, scratch.exists()) == ((), False)
    scratch.mkdir()
    busy = replace(eraser(store, STATES, DRAFTS, tmp_path), clock=time.time).run(SUBJECTS)
    assert busy.downloads.busy == (str(scratch),)
    assert scratch.exists()


def test_a_branch_that_is_not_merged_stops_it_before_anything_is_changed(store: MemoryStore, tmp_path: Path) -> None:
    data = {o.path: store.read(STATES, "main", o.path) for o in store.list(STATES, "main")}
    store.create_branch(STATES, "by-hand", "main")
    for path, content in data.items():
        store.put(STATES, "by-hand", path.replace(W1, "20200101T000000Z"), content)
    for _ in range(2):
        with pytest.raises(Conflict, match="by-hand"):
            erase(store, tmp_path)
        if any(store.uncommitted(STATES, "by-hand")):
            store.commit(STATES, "by-hand", "copied", {})
    assert tree_of(store) == data


def test_a_harvest_at_work_or_a_block_store_out_of_reach_stops_it_before_anything_is_changed(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree_of(store)
    with spool.locked(tmp_path / "spool"), pytest.raises(SpoolBusy):
        erase(store, tmp_path)

    def refuse(self: MemoryStore, repository: str) -> None:
        raise ConfigError("TIDE_LAKEFS_BLOCKS is not set")

    monkeypatch.setattr(MemoryStore, "require_erasable", refuse)
    with pytest.raises(ConfigError):
        erase(store, tmp_path)
    assert tree_of(store) == before


def test_a_manifest_nobody_can_read_is_named_and_not_passed_over(store: MemoryStore, tmp_path: Path) -> None:
    store.create_branch(STATES, "side", "main")
    store.put(STATES, "side", f"windows/{W1}/r0/train/{'f' * 64}.json", b"{}")
    store.commit(STATES, "side", "odd", {})
    store.merge(STATES, "side", "main", "odd", {})
    with pytest.raises(BadInputError, match=r"ffffff\.json is no shard manifest"):
        erase(store, tmp_path)


def test_lineage_still_prints_and_says_what_is_missing(store: MemoryStore, tmp_path: Path) -> None:
    assert "erasure" not in tree(provenance.trace(store, DRAFTS, DRAFT))
    erase(store, tmp_path)
    origin = provenance.trace(store, DRAFTS, DRAFT)
    assert origin.erasures == (SUBJECTS.id,)
    assert f"rows lost by erasure {SUBJECTS.id}: not reproducible" in tree(origin)
    assert f"erasure {SUBJECTS.id}" in mermaid(origin)
    assert provenance.trace(store, DRAFTS, "e" * 64).erasures == ()


def test_a_draft_of_such_a_snapshot_is_not_made_again_and_the_erasure_is_named(
    store: MemoryStore, tmp_path: Path
) -> None:
    commit = store.head(STATES, "main").id
    folder = tiny_draft(tmp_path / "drafts")
    draft = load_draft(folder)
    record = DraftModel(
        digest=draft.digest,
        contract=draft.contract,
        target=TARGET,
        states_repository=STATES,
        states_commit=commit,
        policy=Policy().digest(),
    )
    candidates.publish(store, DRAFTS, "candidate-own", folder, record, None, Policy())

    def again(trainer: Any = None) -> None:
        reproduce(
            store,
            DRAFTS,
            draft.digest,
            trainer=trainer,
            bundle=tmp_path,
            scratch=tmp_path / "scratch",
            on_progress=lambda _: None,
        )

    with pytest.raises(AttributeError, match="train"):
        again()  # before: it goes as far as the trainer, which this test has not
    result = erase(store, tmp_path)
    assert draft.digest in result.erasures[0].drafts
    with pytest.raises(Gone, match=rf"cannot be made again: .* lost rows by erasure {SUBJECTS.id} of 20"):
        again()
    assert "past TIDE" in why_gone(store, DRAFTS, "0" * 64)


def test_killed_at_any_step_the_next_run_completes(tmp_path: Path) -> None:
    """The same main, one plan and one completion at least, and no byte left anywhere, orphans included.

    Killed after a step is killed before the next one: what the dead client had heard does not matter.
    """

    made = MemoryStore()
    filled(made, STATES, DRAFTS, tmp_path / "made" / "spool")
    add_shard(tmp_path / "made" / "spool", SEED, 6, at=START + WINDOW_S + 20)

    def copied(name: str) -> tuple[MemoryStore, Path]:
        shutil.copytree(tmp_path / "made", tmp_path / name)
        return copy.deepcopy(made), tmp_path / name

    (store, root), point = copied("calm"), CrashPoint()
    eraser(crashing(store, point), STATES, DRAFTS, root).run(SUBJECTS)
    wanted = {o.path: store.read(STATES, "main", o.path) for o in store.list(STATES, "main")}
    assert point.steps > 60
    for at in range(point.steps):
        store, root = copied(str(at))
        with pytest.raises(Crash):
            eraser(crashing(store, CrashPoint(at)), STATES, DRAFTS, root).run(SUBJECTS)
        eraser(store, STATES, DRAFTS, root).run(SUBJECTS)
        assert tree_of(store) == wanted, f"step {at}"
        assert list(store.branches(STATES)) == ["main"], f"step {at}"
        assert leaks(store.blocks(STATES)) == [], f"step {at}"
        assert leaks(p.read_bytes() for p in (root / "spool").rglob("*") if p.is_file()) == [], f"step {at}"
        planned = ledger.every(store, DRAFTS, ledger.ERASURE, Erasure)
        done = {r.erasure for r in ledger.every(store, DRAFTS, ledger.ERASED, ErasureDone)}
        assert {r.digest() for r in planned} == done, f"step {at}"
        assert {r.erased_requests for r in planned} == {1}, f"step {at}"
        shutil.rmtree(root)
