"""The local web application behind `winnow dashboard`: pages about runs, which they only read.

It reads what runs leave in their folders and nothing else, so it works during a run, after it, on a
copy, and on a remote URL.

| module | for |
|---|---|
| runs | finds runs, and reads parts of their files |
| metrics_columns | metrics.jsonl as columns, read as it grows |
| answers | the answers of a step, and of one group with their tokens |
| index | sums over all answers of a run, made in the background |
| timeline | the timeline, the log and the checkpoints |
| pages | the data of each page |
| planning | a run's recipe on other GPUs: `winnow plan` as a process |
| service | routes, guard and events |
| sidecar | the server as a child process of a run |

`static/` holds the front end as `make dashboard` builds it from `frontend/`.
"""
