"""Names of the files and folders in a run directory, as paths relative to it.

data/, _quarantine/          the result
_SUCCESS                     written last: the result is complete
partial/_UUID/               partial result: the committed rows of an incomplete run
_raybatch/                   records, and files that are needed until the run is finished
"""

from __future__ import annotations

import re

SUCCESS = "_SUCCESS"
KINDS = ("data", "quarantine")  # kinds of pieces, and of files of the result
DATA_FOLDER = "data"
# Readers of a whole run directory skip names that begin with _, so they do not read failed rows.
QUARANTINE_FOLDER = "_quarantine"
RESULT_FOLDERS = {"data": DATA_FOLDER, "quarantine": QUARANTINE_FOLDER}  # by kind
# Each is in a folder _UUID of its own, which readers of a whole run directory skip.
PARTIAL_FOLDER = "partial"
PARTIAL_NAME = re.compile(r"_[0-9a-f]{32}\Z")

RECORDS = "_raybatch"
PLAN = f"{RECORDS}/plan.json"
TABLES = RECORDS  # shards-HASH.parquet and others that the plan names
INPUT = f"{RECORDS}/input"  # snapshots, one folder for each time that one was made
COPIED = f"{INPUT}/copied"  # which parts of the input are copied, until there is a plan
COMMITS = f"{RECORDS}/commits"
PIECES = f"{RECORDS}/pieces"
CHECKPOINTS = f"{RECORDS}/checkpoints"
OUTPUT_SCHEMA = f"{RECORDS}/output_schema.arrow"
ATTEMPTS = f"{RECORDS}/attempts"
HEARTBEATS = f"{RECORDS}/heartbeats"
LAST_ATTEMPT = f"{RECORDS}/last_attempt.json"  # how the last attempt went; for people
PLANNED_BY = f"{RECORDS}/planned_by.json"  # whose code made the plan; for people
JOBS = f"{RECORDS}/jobs"  # records of the Ray jobs that drove the run
LAYOUT = f"{RECORDS}/layout.json"  # which shards are in which file of the result
PART_NOTES = f"{RECORDS}/parts"  # a record for each result file that is written
ROW_SUMS = f"{RECORDS}/row_sums"
PUBLISHED = f"{RECORDS}/published"  # a record for each target
REQUESTS_FOLDER = (
    f"{RECORDS}/asks"  # run directory of the requests phase, or of a cascade's first model
)
REUSED_FOLDER = f"{RECORDS}/reused"  # answers of an earlier run, in a folder for each try to plan
BY_ROW = f"{RECORDS}/by_row"  # answers in the order of the rows, in a folder for each try
BY_ROW_RECORD = f"{RECORDS}/by_row.json"  # which of these files are whole
ANSWERS_RECORD = f"{RECORDS}/answers.json"  # which files hold the raw answers of a finished run
SUPERSEDED_BY = f"{RECORDS}/superseded.json"  # names the run that continues this one
PRECISION = f"{RECORDS}/precision.json"  # decision on the model's precision
ARRANGEMENT = f"{RECORDS}/arrangement.json"  # engines per GPU and sequences, by earlier runs
QUALITY = f"{RECORDS}/quality.json"  # accuracy on golden rows
AGREEMENT_RECORD = f"{RECORDS}/agreement.json"  # in how many checked rows a cascade's models agree
JUDGE = f"{RECORDS}/judge"  # runs that judge a sample of the answers, a folder for each judge
JUDGEMENT = f"{RECORDS}/judgement.json"  # accuracy of a sample, as found by the judge
SENT_EVENTS = f"{RECORDS}/events-sent.json"  # ids of the events of the completed run
JOURNAL = f"{RECORDS}/journal"  # answers of a hosted model until their shards are committed
BATCHES = f"{RECORDS}/batches"  # files and batches at a hosted model's batch API
PRUNED = f"{RECORDS}/pruned.json"  # this run directory is being removed
DRAIN = f"{RECORDS}/drain.json"  # ids of the attempts that are to stop
REPORT = f"{RECORDS}/report.json"
REPORT_PAGE = f"{RECORDS}/report.md"
REPORT_HTML = f"{RECORDS}/report.html"

POSITION_COLUMN = "__rb_pos"  # the column of a piece with its rows' positions in the shard, from 0

COMMIT_NAME = re.compile(rf"{COMMITS}/(\d{{8,10}})\.json\Z")
PIECE_NAME = re.compile(rf"{PIECES}/(\d{{8,10}})-[0-9a-f]{{32}}\.parquet\Z")
CHECKPOINT_NAME = re.compile(rf"{CHECKPOINTS}/[0-9a-f]{{32}}\.gz\Z")
ATTEMPT_NAME = re.compile(rf"{ATTEMPTS}/([0-9A-Za-z]+)\.json\Z")
PART_NOTE_NAME = re.compile(rf"{PART_NOTES}/(?:data|quarantine)-\d{{5,10}}\.json\Z")
PUBLISHED_NAME = re.compile(rf"{PUBLISHED}/([A-Za-z0-9][A-Za-z0-9._-]*)\.json\Z")
JOB_NAME = re.compile(rf"{JOBS}/(\d{{4,9}})\.json\Z")


def commit_path(shard: int) -> str:
    """Return the path of a shard's commit record in the run directory."""
    return f"{COMMITS}/{shard:08d}.json"


def piece_path(name: str) -> str:
    """Return the path of a piece in the run directory; receipts and commits have only its name."""
    return f"{PIECES}/{name}"


def table_path(name: str) -> str:
    """Return the path of a table in the run directory; the plan has only its name."""
    return f"{TABLES}/{name}"


def attempt_path(attempt: str) -> str:
    """Return the path of the record of the attempt with this id."""
    return f"{ATTEMPTS}/{attempt}.json"


def heartbeat_path(attempt: str) -> str:
    """Return the path of the heartbeat file of the attempt with this id."""
    return f"{HEARTBEATS}/{attempt}.json"


def job_path(number: int) -> str:
    """Return the path of the record of the run's Ray job with this number."""
    return f"{JOBS}/{number:04d}.json"


def job_end_path(number: int) -> str:
    """Return the path of the record that the run's Ray job with this number wrote when it ended."""
    return f"{JOBS}/{number:04d}.end.json"


def published_path(target: str) -> str:
    """Return the path of the record that a run was published to a target."""
    return f"{PUBLISHED}/{target}.json"


def partial_path(name: str, file: str = "") -> str:
    """Return the path of the partial result `name`, or of a file in it."""
    return f"{PARTIAL_FOLDER}/{name}/{file}".rstrip("/")


def row_sums_path(part: str) -> str:
    """Return the path of the file that holds the row checksums of a result file.

    `part` is the path of the result file. If it belongs to a partial result, the checksums are in
    the folder of that partial result.
    """
    folder, _, rest = part.partition("/")
    if folder == PARTIAL_FOLDER:
        name, _, file = rest.partition("/")
        return partial_path(name, f"_row_sums/{file.replace('/', '-')}")
    return f"{ROW_SUMS}/{part.replace('/', '-')}"
