// Step → prompt → its answers, with the text of each and its tokens.
import type { ComponentChildren } from 'preact'
import { useEffect, useMemo, useRef, useState } from 'preact/hooks'
import { query, useData, type Answer, type Groups, type Pieces, type Run } from './api'
import { Beside, BesideChoice, keyOf, useFollowed, type GroupData } from './beside'
import { axes, Chart, color, tip, useTheme } from './chart'
import { fixed, number, OUTCOMES } from './format'
import { Choice, Empty, Images, nearest, Panel, Problem, RunChoice, StepChoice, useKeys } from './parts'
import { change, current, type Words } from './route'
import { Tokens, COLORINGS, visible, type Coloring } from './tokens'

const FILTERS: Record<string, { text: string; says: string; keeps: (g: Groups, at: number) => boolean }> = {
  all: { text: 'All', says: 'Every prompt of the step', keeps: () => true },
  wrong: { text: 'All wrong', says: 'No answer is right', keeps: (g, at) => g.accuracy[at] === 0 },
  cut: { text: 'Cut off', says: 'An answer reached the limit of tokens', keeps: (g, at) => g.cut_off[at] > 0 },
  overlong: { text: 'Overlong', says: 'An answer was penalised for its length', keeps: (g, at) => g.overlong[at] > 0 },
  failed: { text: 'Failed', says: 'Scoring of an answer failed', keeps: (g, at) => g.failed[at] > 0 },
  mismatch: { text: 'Mismatch', says: 'Largest distance of the sampler’s log-probs from the trainer’s first, of answers that were trained on', keeps: (g, at) => g.mismatch[at] !== null },
}
const ROWS = 200

type Found = { groups: Record<string, string[]>; kept: number }

export function Answers({ runs, words }: { runs: Run[]; words: URLSearchParams }) {
  const run = words.get('run') ?? ''
  const kind = words.get('kind') ?? 'training'
  const steps = useData<Record<string, number[]>>(query('run/steps', { run }), [run])
  const there = steps.data?.[kind] ?? []
  const stepAt = (asked: string | null) => (asked === null ? there.length - 1 : nearest(there, Number(asked)))
  const step = there.length ? there[stepAt(words.get('step'))] : null
  const search = words.get('q') ?? ''
  const filter = words.get('filter') ?? 'all'
  const groups = useData<Groups>(step === null ? null : query('run/groups', { run, kind, step }), [])
  const found = useData<Found>(step === null || !search ? null : query('run/search', { run, kind, step, q: search }), [])
  // While another step is on its way the last one stays, so that nothing jumps.
  const last = useRef<{ table: Groups; kind: string; step: number } | null>(null)
  if (groups.error || step === null) last.current = null
  else if (groups.data && !groups.stale) last.current = { table: groups.data, kind, step }
  const table = last.current?.table ?? null
  const hits = search ? found.data : null
  const shown = useMemo(() => rowsOf(table, filter, search ? hits : null, !!search), [table, filter, hits, search])
  const placeOf = (group: string | null) => Math.max(shown.findIndex((at) => String(table?.group[at]) === group), 0)
  const place = placeOf(words.get('group'))
  const at = shown[place]
  const group = table && at !== undefined ? table.group[at] : null
  const field = useRef<HTMLInputElement>(null)
  const goStep = (by: number) => {
    const next = there[stepAt(current('step')) + by]
    if (next !== undefined) change({ step: next, group: null, answer: null })
  }
  const goGroup = (by: number) => {
    const next = shown[Math.min(Math.max(placeOf(current('group')) + by, 0), shown.length - 1)]
    if (table && next !== undefined) change({ step: last.current!.step, group: table.group[next], answer: null })
  }
  useKeys({
    j: () => goGroup(1), ArrowDown: () => goGroup(1),
    k: () => goGroup(-1), ArrowUp: () => goGroup(-1),
    ']': () => goStep(1), '[': () => goStep(-1),
    '/': () => field.current?.focus(),
    Escape: () => field.current?.blur(),
  })
  return (
    <div class="answers">
      <div class="bar">
        <RunChoice runs={runs} run={run} />
        <Choice label="Answers" value={kind} options={[['training', 'Training'], ['held_out', 'Held out']]} onChange={(value) => change({ kind: value, step: null, group: null, answer: null }, true)} />
        {step !== null && <StepChoice steps={there} step={step} onChange={(next) => change({ step: next, group: null, answer: null })} />}
        {step !== null && <BesideChoice runs={runs} beside={words.get('beside')} />}
        {step !== null && step !== there[there.length - 1] && <button type="button" onClick={() => change({ step: null, group: null, answer: null })}>Newest</button>}
        <input
          ref={field}
          type="search"
          placeholder="Search in texts of this step  ( / )"
          aria-label="Search in texts of this step"
          value={search}
          onChange={(event) => change({ q: event.currentTarget.value || null, group: null })}
        />
      </div>
      {steps.error && <Problem>{steps.error}</Problem>}
      {groups.error && <Problem>{groups.error}</Problem>}
      {steps.data && step === null && <Empty>{kind === 'training' ? 'This run has no answers yet: its first step is not done.' : 'This run has no evaluation yet (evaluation.every, data.eval_files).'}</Empty>}
      {table && (
        <div class={groups.stale ? 'columns stale' : 'columns'}>
          <div class="groups">
            <div class="filters" role="radiogroup" aria-label="Filter">
              {Object.entries(FILTERS).map(([name, each]) => {
                const count = table.group.filter((_, n) => each.keeps(table, n)).length
                return (
                  <button type="button" role="radio" aria-checked={filter === name} disabled={name !== 'all' && !count} onClick={() => change({ filter: name === 'all' ? null : name, group: null })}
                    title={each.says}>
                    {each.text}<span class="count">{name === 'mismatch' && !count ? 'not kept' : count}</span>
                  </button>
                )
              })}
            </div>
            {search && hits && <p class="dim note">{shown.length} prompts with “{search}” in their texts; {hits.kept} answers of this step kept theirs.</p>}
            {found.error && <Problem>{found.error}</Problem>}
            <GroupTable table={table} step={last.current!.step} rows={shown} place={place} />
            {!shown.length && !(search && found.stale) && <Empty>No prompt of this step matches.</Empty>}
          </div>
          {group !== null && at !== undefined
            ? <Group run={run} kind={last.current!.kind} step={last.current!.step} group={group} table={table} at={at} words={words} hits={hits?.groups[group] ?? []} search={search} />
            : <div />}
        </div>
      )}
    </div>
  )
}

function rowsOf(table: Groups | null, filter: string, hits: Found | null, isSearch: boolean): number[] {
  if (!table || (isSearch && !hits)) return []
  const keeps = (FILTERS[filter] ?? FILTERS.all).keeps
  const rows = table.group.map((_, at) => at)
    .filter((at) => keeps(table, at) && (!hits || String(table.group[at]) in hits.groups))
  if (filter === 'mismatch') return rows.sort((a, b) => table.mismatch[b]! - table.mismatch[a]!)
  // Those with a text first: there is something to read.
  return [...rows.filter((at) => table.prompt[at] !== null), ...rows.filter((at) => table.prompt[at] === null)]
}

function GroupTable({ table, step, rows, place }: { table: Groups; step: number; rows: number[]; place: number }) {
  const list = useRef<HTMLTableSectionElement>(null)
  const [most, show] = useState(ROWS)
  const last = Math.max(most, place + 20)
  useEffect(() => list.current?.querySelector('[aria-selected=true]')?.scrollIntoView({ block: 'nearest' }), [place, rows])
  return (
    <div class="scroll">
      <table class="pick">
        <thead><tr><th>Prompt</th><th>Fate</th><th class="n">Right</th><th class="n">Reward</th><th class="n">Tokens</th></tr></thead>
        <tbody ref={list}>
          {rows.slice(0, last).map((at, n) => (
            <tr aria-selected={n === place} onClick={() => change({ step, group: table.group[at], answer: null })}>
              <td class="prompt">{table.prompt[at] ?? <span class="dim" title="Its text was not kept (observe.rollout_text_tokens)">{table.uid[at]}</span>}</td>
              <td><span class={`fate ${table.outcome[at]}`}>{OUTCOMES[table.outcome[at]]?.[0] ?? table.outcome[at]}</span></td>
              <td class="n">{right(table, at)}</td>
              <td class="n">{fixed(table.reward[at])}</td>
              <td class="n">{number(Math.round(table.length[at] ?? 0), 'count')}{table.cut_off[at] > 0 && <span class="cut" title={`${table.cut_off[at]} cut off at the limit`}>✂</span>}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {rows.length > last && <button type="button" class="wide" onClick={() => show(last + ROWS)}>Show more of {rows.length}</button>}
    </div>
  )
}

function right(table: Groups, at: number): string {
  const share = table.accuracy[at] ?? 0
  const whole = share * table.answers[at]
  return Math.abs(whole - Math.round(whole)) < 0.01 ? `${Math.round(whole)}/${table.answers[at]}` : number(share, 'share')
}

function Group(props: {
  run: string
  kind: string
  step: number
  group: number
  table: Groups
  at: number
  words: URLSearchParams
  hits: string[]
  search: string
}) {
  const { run, kind, step, group, table, at, words } = props
  const { data, error, stale } = useData<GroupData>(query('run/group', { run, kind, step, group }), [])
  const answers = data?.answers ?? []
  const placeOf = (key: string | null) => Math.max(answers.findIndex((each) => keyOf(each) === key), 0)
  const place = placeOf(words.get('answer'))
  const answer = answers[place]
  const pinned = { step, group } // the run goes on, and what is being read stays
  const coloringOf = (word: string | null) => (word ?? 'logprobs') as Coloring
  const coloring = coloringOf(words.get('color'))
  const go = (by: number) => {
    const next = answers[Math.min(Math.max(placeOf(current('answer')) + by, 0), answers.length - 1)]
    if (next) change({ ...pinned, answer: keyOf(next) })
  }
  useKeys({
    l: () => go(1), ArrowRight: () => go(1),
    h: () => go(-1), ArrowLeft: () => go(-1),
    c: () => change({ color: COLORINGS[(COLORINGS.indexOf(coloringOf(current('color'))) + 1) % COLORINGS.length] }),
  })
  const other = words.get('beside')
  const tokens = answer && <Tokens run={run} answer={answer} meanings={data!.meanings} without={data!.without_tokens} coloring={coloring} search={props.search} />
  const [label, why] = OUTCOMES[table.outcome[at]] ?? [table.outcome[at], '']
  return (
    <div class={stale ? 'group stale' : 'group'}>
      <div class="head">
        <h2>{table.uid[at]}</h2>
        <span class="dim">{table.source[at]}, group {group}</span>
        <p><span class={`fate ${table.outcome[at]}`}>{label}</span> {why}</p>
      </div>
      {error && <Problem>{error}</Problem>}
      {answer && <Prompt run={run} answer={answer} />}
      {answers.length > 0 && <AnswerTable answers={answers} place={place} hits={props.hits} pinned={pinned} />}
      {answer && (other ? <Beside run={run} step={step} kind={kind} uid={table.uid[at]} other={other} words={words} answer={answer} coloring={coloring}>{tokens}</Beside> : tokens)}
      <Follow run={run} kind={kind} uid={table.uid[at]} />
    </div>
  )
}

function Prompt({ run, answer }: { run: string; answer: Answer }) {
  const [isOpen, open] = useState(false)
  const text = answer.prompt
  if (text === null) return null
  const pieces = answer.prompt_pieces
  const images = answer.images ?? []
  const later = (answer.turns ?? []).reduce((sum, turn) => sum + (turn.images?.length ?? 0), 0)
  const isLong = text.length > 600 || text.split('\n').length > 8
  return (
    <Panel title="Prompt" unit={`${number(answer.prompt_tokens, 'count')} tokens`}
      side={isLong && <button type="button" onClick={() => open(!isOpen)}>{isOpen ? 'Less' : 'All of it'}</button>}>
      <Images run={run} paths={images.slice(0, images.length - later)} />
      <pre class={isLong && !isOpen ? 'text short' : 'text'}>{pieces ? marked(pieces) : text}</pre>
    </Panel>
  )
}

/** A prompt's text with its special tokens set apart, those of an image as one. */
function marked({ texts, special }: Pieces) {
  const parts: ComponentChildren[] = []
  let start = 0
  special.forEach((at, n) => {
    if (at < start) return
    let times = 1
    while (special[n + times] === at + times && texts[at + times] === texts[at]) times++
    parts.push(visible(texts.slice(start, at).join('')), <span class="special">{texts[at]}{times > 1 && ` × ${times}`}</span>)
    start = at + times
  })
  return [...parts, visible(texts.slice(start).join(''))]
}

function AnswerTable({ answers, place, hits, pinned }: { answers: Answer[]; place: number; hits: string[]; pinned: Words }) {
  const parts = [...new Set(answers.flatMap((each) => Object.keys(each).filter((name) => name.startsWith('part/') && each[name] !== null)))]
  return (
    <div class="scroll answer-list">
      <table class="pick">
        <thead>
          <tr>
            <th>Answer</th><th>Worth</th><th class="n">Reward</th>
            {parts.length > 1 && parts.map((name) => <th class="n">{name.slice(5)}</th>)}
            <th class="n">Advantage</th><th class="n">Tokens</th><th>End</th><th class="n">Version</th><th>Read as</th>
          </tr>
        </thead>
        <tbody>
          {answers.map((each, n) => (
            <tr aria-selected={n === place} onClick={() => change({ ...pinned, answer: keyOf(each) })}>
              <td>{each.kind === 'greedy' ? 'greedy' : each.answer + 1}{hits.includes(keyOf(each)) && <span class="hit" title="Holds the text searched for">●</span>}</td>
              <td>{worth(each)}</td>
              <td class="n">{fixed(each.reward)}</td>
              {parts.length > 1 && parts.map((name) => <td class="n">{typeof each[name] === 'number' ? plus(each[name] as number) : '–'}</td>)}
              <td class="n">{each.advantage === null ? '–' : plus(each.advantage)}</td>
              <td class="n">{number(each.response_tokens, 'count')}</td>
              <td>{each.finish_reason === 'length' ? <span class="bad">cut off</span> : each.finish_reason === 'stop' ? 'ended' : (each.finish_reason ?? '–')}</td>
              <td class="n">{versions(each)}</td>
              <td class="pred" title={each.pred ?? ''}>{each.pred ?? '–'}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  )
}

function worth(answer: Answer) {
  if (answer.scorer_error) return <span class="bad" title={answer.scorer_error}>scoring failed</span>
  if (answer.accuracy >= 1) return <span class="good">right</span>
  return answer.accuracy <= 0 ? <span class="bad">wrong</span> : number(answer.accuracy, 'share')
}

const plus = (value: number) => `${value < -0.004999 ? '−' : value > 0.004999 ? '+' : ''}${Math.abs(value).toFixed(2)}`

function versions(answer: Answer): string {
  if (answer.newest_version === null) return '–'
  return answer.oldest_version === answer.newest_version ? `${answer.newest_version}` : `${answer.oldest_version}–${answer.newest_version}`
}

function Follow({ run, kind, uid }: { run: string; kind: string; uid: string }) {
  const theme = useTheme()
  const { data } = useFollowed(run, kind, uid)
  const option = useMemo(() => {
    const rows = data?.rows ?? []
    const steps = rows.map((row) => row.step)
    const made = axes({ min: Math.min(...steps), max: Math.max(...steps) }, { min: 0, max: 1 }, 'count', 'share', 2)
    made.series = [{ type: 'line', data: rows.map((row) => [row.step, row.accuracy]), symbolSize: 7, color: color('--accent'), lineStyle: { width: 1.5 } }]
    made.tooltip.formatter = (given: { dataIndex: number }[]) => {
      const row = rows[given[0].dataIndex]
      return tip(`step ${row.step}`, [
        { label: 'right', value: number(row.accuracy, 'share') },
        { label: 'reward', value: number(row.reward) },
        { label: 'tokens', value: number(row.length, 'count') },
        { label: 'fate', value: OUTCOMES[row.outcome]?.[0] ?? row.outcome },
      ])
    }
    return made
  }, [data, theme])
  if (!data) return null
  const progress = data.is_done ? '' : `, ${data.read} of ${data.steps} steps read so far`
  return (
    <Panel title="This prompt over the steps" unit={`in ${data.rows.length} of ${data.steps} steps${progress}`}>
      {data.rows.length > 1
        ? <Chart option={option} height={96} label="Share of right answers to this prompt by step"
            onClick={(event) => { const row = data.rows[event.dataIndex as number]; change({ step: row.step, group: row.group, answer: null }, true) }} />
        : <Empty>{data.rows.length ? 'So far the run has asked it once.' : 'Not asked so far.'}</Empty>}
    </Panel>
  )
}
