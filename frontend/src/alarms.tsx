// What the rules of `winnow doctor` find in a run, and the state of each rule.
import { query, useData, type Run } from './api'
import { Empty, Panel, Problem, Problems, RunChoice } from './parts'
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

interface Rule {
  name: string
  cause: string
  /** What it lacks to be checked; null if it is checked. */
  need: string | null
}
interface Data {
  findings: Finding[]
  steps: number
  rules: Rule[]
  problems: string[]
}

// Where a finding is seen: groups of the step, or its times; else the curves.
const FILTERS: Record<string, string> = {
  reward_flat_wrong: 'wrong', filtered: 'wrong', cut_off: 'cut', length_hacking: 'overlong', scoring_fails: 'failed', mismatch: 'mismatch',
}
const OF_TIME = ['slow_scoring', 'learner_starves', 'engine_starves', 'stale']

export function Alarms({ runs, words }: { runs: Run[]; words: URLSearchParams }) {
  const run = words.get('run') ?? ''
  const { data, error } = useData<Data>(query('run/alarms', { run }), [run])
  return (
    <div class="page alarms">
      <div class="bar">
        <RunChoice runs={runs} run={run} />
        {data && <span class="dim">{data.findings.length} {data.findings.length === 1 ? 'finding' : 'findings'} in {data.steps} steps</span>}
      </div>
      {error && <Problem>{error}</Problem>}
      {data && <Problems lines={data.problems} />}
      {data && !data.findings.length && <Empty>{data.steps ? 'No rule of winnow doctor that could be checked finds anything wrong with this run.' : 'No step is done yet.'}</Empty>}
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
      {data && <Rules {...data} />}
    </div>
  )
}

/** All rules with a state each: those that fired, then those that were quiet, then those not checked so far. */
function Rules({ rules, findings }: Data) {
  const fired = new Map(findings.map((each) => [each.name, each]))
  const parts = [rules.filter((each) => fired.has(each.name)), rules.filter((each) => !fired.has(each.name) && !each.need), rules.filter((each) => !fired.has(each.name) && each.need)]
  return (
    <Panel title="All rules" unit={`${parts[0].length} fired, ${parts[1].length} quiet, ${parts[2].length} not checked`}>
      <table class="rules">
        <thead><tr><th>State</th><th>Rule</th><th>Would mean, or needs</th></tr></thead>
        <tbody>
          {parts.flat().map((rule) => {
            const found = fired.get(rule.name)
            const [state, sign] = found ? [`fired ${found.severity}`, '✕ fired'] : rule.need ? ['waits', '– not checked'] : ['quiet', '✓ quiet']
            return <tr class={state}><td>{sign}</td><td>{rule.name.replace(/_/g, ' ')}</td><td>{found?.evidence ?? rule.need ?? rule.cause}</td></tr>
          })}
        </tbody>
      </table>
    </Panel>
  )
}
