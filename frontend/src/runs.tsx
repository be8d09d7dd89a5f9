// The runs as a table: searched, filtered and sorted, with the settings in which they differ.
import type { ComponentChildren } from 'preact'
import { useState } from 'preact/hooks'
import type { Run } from './api'
import { ago, duration, middle, number } from './format'
import { Choice, Empty, Panel } from './parts'
import { change, link } from './route'

type Value = string | number | boolean | null | undefined
interface Column {
  key: string
  title: string
  isText?: boolean
  /** What the rows are sorted by. */
  value: (run: Run) => Value
  show: (run: Run) => ComponentChildren
}

const heldOut = (run: Run) => Object.values(run.held_out ?? {})[0]
const RESULTS: Column[] = [
  { key: 'state', title: 'State', isText: true, value: (run) => run.state, show: (run) => <span class={`state ${run.state}`}>{run.state}{run.left_s !== null && <span class="dim">, {duration(run.left_s)} left</span>}</span> },
  { key: 'step', title: 'Step', value: (run) => run.step, show: (run) => `${run.step}${run.steps ? ` / ${run.steps}` : ''}` },
  { key: 'accuracy', title: 'Accuracy', value: (run) => run.accuracy, show: (run) => number(run.accuracy, 'share') },
  { key: 'held_out', title: 'Held out', value: heldOut, show: (run) => number(heldOut(run), 'share') },
  { key: 'step_s', title: 'Step time', value: (run) => run.step_s, show: (run) => number(run.step_s, 'seconds') },
  { key: 'changed', title: 'Written', value: (run) => run.changed_s, show: (run) => (run.changed_s ? ago(run.changed_s) : '–') },
]
const STATES: [string, string][] = [['', 'All'], ['live', 'Live'], ['idle', 'Idle'], ['done', 'Done']]
/** Settings that have a column before all are asked for. */
const FEW = 5

/** Names that this browser keeps; a dashboard writes nothing beside the runs. */
function useStored(key: string): [string[], (name: string) => void] {
  const [names, hold] = useState<string[]>(() => JSON.parse(localStorage.getItem(key) ?? '[]'))
  const toggle = (name: string) => {
    const next = names.includes(name) ? names.filter((each) => each !== name) : [...names, name]
    localStorage.setItem(key, JSON.stringify(next))
    hold(next)
  }
  return [names, toggle]
}

function compare(a: Value, b: Value): number {
  return typeof a === 'number' && typeof b === 'number' ? a - b : String(a).localeCompare(String(b), 'en', { numeric: true })
}

function matches(run: Run, text: string): boolean {
  const all = [run.name, ...Object.entries(run.settings ?? {}).map(([key, value]) => `${key}=${value}`)].join('\n').toLowerCase()
  return text.toLowerCase().split(/\s+/).every((word) => all.includes(word))
}

export function RunsTable({ runs, chosen, colors, words, onChoose }: {
  runs: Run[]
  chosen: string[]
  colors: Map<string, string>
  words: URLSearchParams
  onChoose: (names: string[]) => void
}) {
  const [pinned, pin] = useStored('pinned')
  const [hidden, hide] = useStored('hidden')
  const [showsHidden, showHidden] = useState(false)
  const settings = Object.keys(runs.find((each) => each.settings)?.settings ?? {})
  const isWide = words.get('settings') === 'all'
  const columns: Column[] = [...RESULTS, ...settings.slice(0, isWide ? settings.length : FEW).map((key): Column => {
    const value = (run: Run) => run.settings?.[key]
    return { key, title: key, isText: !runs.some((run) => typeof value(run) === 'number'), value, show: (run) => middle(String(value(run) ?? '–'), 24) }
  })]
  const sort = words.get('sort') ?? 'name'
  const [key, sign] = sort.startsWith('-') ? [sort.slice(1), -1] : [sort, 1]
  const value = columns.find((each) => each.key === key)?.value ?? ((run: Run) => run.name)
  const found = runs
    .filter((run) => matches(run, words.get('q') ?? '') && (!words.get('state') || run.state === words.get('state')))
  const shown = found.filter((run) => showsHidden || !hidden.includes(run.place)).sort((a, b) =>
    Number(pinned.includes(b.place)) - Number(pinned.includes(a.place))
    || Number(value(a) == null) - Number(value(b) == null)
    || sign * compare(value(a), value(b)))
  const away = found.filter((run) => hidden.includes(run.place)).length
  const names = shown.filter((run) => !run.problem).map((run) => run.name)
  const hasAll = names.every((name) => chosen.includes(name))
  const toggle = (name: string) => onChoose(chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name])
  const head = (each: { key: string; title: string; isText?: boolean }) => (
    <th class={each.isText ? '' : 'n'} aria-sort={key === each.key ? (sign > 0 ? 'ascending' : 'descending') : undefined}>
      <button type="button" title={each.title} onClick={() => change({ sort: key === each.key && sign > 0 ? `-${each.key}` : each.key })}>
        {middle(each.title, 26)}{key === each.key ? (sign > 0 ? ' ↑' : ' ↓') : ''}
      </button>
    </th>
  )
  return (
    <Panel title="Runs" unit={`${chosen.length} of ${runs.length} drawn`} class="runs" side={
      <>
        {away > 0 && <button type="button" onClick={() => showHidden(!showsHidden)}>{showsHidden ? 'Without' : 'With'} {away} hidden</button>}
        {settings.length > FEW && <button type="button" onClick={() => change({ settings: isWide ? null : 'all' })}>{isWide ? 'Fewer settings' : `All ${settings.length} settings that differ`}</button>}
      </>
    }>
      <div class="bar">
        <input type="search" aria-label="Search runs" placeholder="name, or a setting such as optim.lr=0.001" value={words.get('q') ?? ''} onInput={(event) => change({ q: event.currentTarget.value })} />
        <Choice label="State" value={words.get('state') ?? ''} options={STATES} onChange={(state) => change({ state })} />
      </div>
      <div class="scroll">
        <table>
          <thead>
            <tr>
              <th><input type="checkbox" aria-label="Draw all" checked={hasAll} onChange={() => onChoose(hasAll ? chosen.filter((name) => !names.includes(name)) : [...new Set([...chosen, ...names])])} /></th>
              {head({ key: 'name', title: 'Name', isText: true })}
              {columns.map(head)}
              <th />
            </tr>
          </thead>
          <tbody>
            {shown.map((run) => (
              <tr key={run.place} class={chosen.includes(run.name) ? 'chosen' : ''}>
                <td><input type="checkbox" aria-label={run.name} checked={chosen.includes(run.name)} onChange={() => toggle(run.name)} /></td>
                <td class="name" title={`${run.name}\n${run.place}`} onClick={() => toggle(run.name)}>
                  <i class="dot" style={{ background: colors.has(run.name) ? `var(${colors.get(run.name)})` : 'var(--line)' }} />
                  {middle(run.name, 36)}
                  {run.alarms > 0 && <a class="badge" href={link('alarms', { run: run.name })} title="Alarms: what its rules have found" onClick={(event) => event.stopPropagation()}>{run.alarms}</a>}
                </td>
                {run.problem
                  ? <td colSpan={columns.length}><p class="problem">{run.problem}</p></td>
                  : columns.map((each) => <td class={`${each.isText ? '' : 'n'} ${each.key}`} title={each.key in (run.settings ?? {}) ? `${each.key}=${each.value(run)}` : undefined}>{each.show(run)}</td>)}
                <td class="n">
                  {!run.problem && <a href={link('answers', { run: run.name })}>Answers</a>}
                  <button type="button" class="icon" aria-pressed={pinned.includes(run.place)} aria-label="Pin" title="Keep at the top" onClick={() => pin(run.place)}>{pinned.includes(run.place) ? '★' : '☆'}</button>
                  <button type="button" class="icon" aria-pressed={hidden.includes(run.place)} aria-label="Hide" title="Hide in this browser" onClick={() => {
                    if (!hidden.includes(run.place) && chosen.includes(run.name)) toggle(run.name)
                    hide(run.place)
                  }}>{hidden.includes(run.place) ? '+' : '✕'}</button>
                </td>
              </tr>
            ))}
          </tbody>
        </table>
        {!shown.length && <Empty>No run is called so, or in this state.</Empty>}
      </div>
    </Panel>
  )
}
