// What the rules of `winnow doctor` find in a run, each with its evidence and a remedy.
import { query, useData, type Run } from './api'
import { Empty, Problem, Problems, RunChoice } from './parts'
import { link } from './route'

interface Finding {
  name: string
  severity: 'critical' | 'warning' | 'note'
  first_step: number
  last_step: number
  evidence: string
  cause: string
  remedy: string
}

// Where a finding is seen: groups of the step, or its times; else the curves.
const FILTERS: Record<string, string> = {
  reward_flat_wrong: 'wrong', filtered: 'wrong', cut_off: 'cut', length_hacking: 'overlong', scoring_fails: 'failed', mismatch: 'mismatch',
}
const OF_TIME = ['slow_scoring', 'learner_starves', 'engine_starves', 'stale']

export function Alarms({ runs, words }: { runs: Run[]; words: URLSearchParams }) {
  const run = words.get('run') ?? ''
  const { data, error } = useData<{ findings: Finding[]; steps: number; too_short: string; problems: string[] }>(query('run/alarms', { run }), [run])
  return (
    <div class="page alarms">
      <div class="bar">
        <RunChoice runs={runs} run={run} />
        {data && <span class="dim">{data.findings.length} {data.findings.length === 1 ? 'finding' : 'findings'} in {data.steps} steps</span>}
      </div>
      {error && <Problem>{error}</Problem>}
      {data && <Problems lines={data.problems} />}
      {data && data.steps > 0 && data.too_short && <p class="dim note">{data.too_short}</p>}
      {data && !data.findings.length && <Empty>{data.steps ? data.too_short ? 'The other rules of winnow doctor find nothing wrong with this run.' : 'The rules of winnow doctor find nothing wrong with this run.' : 'No step is done yet.'}</Empty>}
      {data?.findings.map((each) => (
        <section class="panel finding" aria-label={each.name}>
          <header>
            <span class={`severity ${each.severity}`}>{each.severity}</span>
            <h2>{each.name.replace(/_/g, ' ')}</h2>
            <span class="unit">{each.first_step === each.last_step ? `after step ${each.last_step}` : `after steps ${each.first_step} to ${each.last_step}`}</span>
            <div class="side">
              {OF_TIME.includes(each.name)
                ? <a href={link('time', { run, step: each.last_step })}>Time of step {each.last_step}</a>
                : <><a href={link('overview', { runs: [run] })}>Curves</a> · <a href={link('answers', { run, step: each.last_step, filter: FILTERS[each.name] ?? null })}>Answers of step {each.last_step}</a></>}
            </div>
          </header>
          <dl>
            <dt>Evidence</dt><dd>{each.evidence}</dd>
            <dt>Likely</dt><dd>{each.cause}</dd>
            <dt>Remedy</dt><dd>{each.remedy}</dd>
          </dl>
        </section>
      ))}
    </div>
  )
}
