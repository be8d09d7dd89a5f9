// The runs as a table: searched, filtered, sorted and put together, with the settings in which they differ.
import type { ComponentChildren, VNode } from 'preact'
import { useState } from 'preact/hooks'
import type { Run } from './api'
import { ago, duration, middle, number, type Unit } from './format'
import { Choice, Empty, Panel } from './parts'
import { change, link } from './route'
import { grouped, interval, INTERVAL } from './seeds'

type Value = string | number | boolean | null | undefined
interface Column {
  key: string
  title: string
  isText?: boolean
  /** The unit of a result, which has a mean over seeds. */
  unit?: Unit
  /** What the rows are sorted by. */
  value: (run: Run) => Value
  show: (run: Run) => ComponentChildren
}

const heldOut = (run: Run) => Object.values(run.held_out ?? {})[0]
const RESULTS: Column[] = [
  { key: 'recipe', title: 'Recipe', isText: true, value: (run) => run.recipe, show: (run) => middle(run.recipe ?? '–', 24) },
  { key: 'state', title: 'State', isText: true, value: (run) => run.state, show: (run) => <span class={`state ${run.state}`}>{run.state}{run.left_s !== null && <span class="dim">, {duration(run.left_s)} left</span>}</span> },
  { key: 'step', title: 'Step', value: (run) => run.step, show: (run) => `${run.step}${run.steps ? ` / ${run.steps}` : ''}` },
  { key: 'accuracy', title: 'Accuracy', unit: 'share', value: (run) => run.accuracy, show: (run) => number(run.accuracy, 'share') },
  { key: 'held_out', title: 'Held out', unit: 'share', value: heldOut, show: (run) => number(heldOut(run), 'share') },
  { key: 'step_s', title: 'Step time', unit: 'seconds', value: (run) => run.step_s, show: (run) => number(run.step_s, 'seconds') },
  { key: 'changed', title: 'Written', value: (run) => run.changed_s, show: (run) => (run.changed_s ? ago(run.changed_s) : '–') },
]
const STATES: [string, string][] = [['', 'All'], ['live', 'Live'], ['idle', 'Idle'], ['done', 'Done']]
/** Settings that have a column before all are asked for. */
const FEW = 5

/** Names that this browser keeps; a dashboard writes nothing beside the runs. */
function useStored(key: string): [string[], (toggled: string[]) => void] {
  const [names, hold] = useState<string[]>(() => JSON.parse(localStorage.getItem(key) ?? '[]'))
  const toggle = (toggled: string[]) => {
    const next = toggledIn(names, toggled)
    localStorage.setItem(key, JSON.stringify(next))
    hold(next)
  }
  return [names, toggle]
}

/** Names without those that were toggled, or with them where one was not there. */
function toggledIn(names: string[], toggled: string[]): string[] {
  return toggled.every((each) => names.includes(each)) ? names.filter((each) => !toggled.includes(each)) : [...new Set([...names, ...toggled])]
}

function compare(a: Value, b: Value): number {
  return typeof a === 'number' && typeof b === 'number' ? a - b : String(a).localeCompare(String(b), 'en', { numeric: true })
}

const SEARCH = `Words that a run’s name or settings contain. optim.lr=2e-4, or lr=2e-4: a setting in which the runs differ has this value; also != < <= > >=, and recipe, state, step, accuracy, held_out, step_s. A click on a setting adds it.`
const CONDITION = /^([^=<>!]+)(!=|<=|>=|[=<>])(.+)$/
const plain = (value: Value) => String(value).replace(/\s+/g, '').toLowerCase()

function matches(run: Run, text: string): boolean {
  const values: Record<string, Value> = { ...run.settings, ...Object.fromEntries(RESULTS.map((each) => [each.key, each.value(run)])) }
  const all = [run.name, ...Object.entries(run.settings ?? {}).map(([key, value]) => `${key}=${value}`)].join('\n').toLowerCase()
  return text.toLowerCase().split(/\s+/).every((word) => {
    const [, typed, sign, wanted] = CONDITION.exec(word) ?? []
    const name = typed?.replace(/\//g, '.')
    const key = name && [name, `${name}.name`, ...Object.keys(values).filter((each) => each.endsWith(`.${name}`))].find((each) => each in values)
    if (!key) return all.includes(word)
    const [value, limit] = [values[key], Number(wanted)]
    const isNumber = typeof value === 'number' && !Number.isNaN(limit)
    const isSame = isNumber ? value === limit : plain(value) === plain(wanted)
    if (sign === '=' || sign === '!=') return isSame === (sign === '=')
    return isNumber && ((isSame && sign.length === 2) || (sign[0] === '<' ? value < limit : value > limit))
  })
}

/** What a column says of several runs: their mean, or all that they have. */
function summary(column: Column, runs: Run[]): ComponentChildren {
  if (column.unit) {
    const values = runs.map(column.value).filter((each) => typeof each === 'number')
    const [mean, half] = values.length ? interval(values) : [null, null]
    return `${number(mean, column.unit)}${half === null ? '' : ` ± ${number(half, column.unit)}`}`
  }
  if (column.key === 'changed') return column.show(runs.reduce((a, b) => ((b.changed_s ?? 0) > (a.changed_s ?? 0) ? b : a)))
  const texts = [...new Set(runs.map((run) => String(column.value(run) ?? '–')))]
  return texts.length > 1 ? middle(texts.join(', '), 24) : column.show(runs[0])
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
  const [opened, open] = useState<string[]>([])
  const settings = Object.keys(runs.find((each) => each.settings)?.settings ?? {})
  const isWide = words.get('settings') === 'all'
  const columns: Column[] = [...RESULTS, ...settings.slice(0, isWide ? settings.length : FEW).map((key): Column => {
    const value = (run: Run) => run.settings?.[key]
    return { key, title: key, isText: !runs.some((run) => typeof value(run) === 'number'), value, show: (run) => middle(String(value(run) ?? '–'), 24) }
  })]
  const sort = words.get('sort') ?? 'name'
  const [key, sign] = sort.startsWith('-') ? [sort.slice(1), -1] : [sort, 1]
  const column = columns.find((each) => each.key === key)
  const value = (of: Run[]): Value => {
    if (!column) return of[0].name
    const values = of.map(column.value).filter((each) => each != null)
    return values.length && values.every((each) => typeof each === 'number') ? interval(values)[0] : values[0]
  }
  const recipes = [...new Set(runs.map((run) => run.recipe ?? '–'))].sort()
  const found = runs
    .filter((run) => matches(run, words.get('q') ?? '') && (!words.get('state') || run.state === words.get('state')))
    .filter((run) => !words.get('recipe') || (run.recipe ?? '–') === words.get('recipe'))
  const isTogether = words.get('seeds') === 'mean'
  const inOrder = (a: Run[], b: Run[]) =>
    Number(b.some((run) => pinned.includes(run.place))) - Number(a.some((run) => pinned.includes(run.place)))
    || Number(value(a) == null) - Number(value(b) == null)
    || sign * compare(value(a), value(b))
  const shown = found.filter((run) => showsHidden || !hidden.includes(run.place))
  const groups = grouped(shown, isTogether).sort((a, b) => inOrder(a.runs, b.runs))
  const away = found.filter((run) => hidden.includes(run.place)).length
  const names = shown.filter((run) => !run.problem).map((run) => run.name)
  const hasAll = names.every((name) => chosen.includes(name))
  const head = (each: { key: string; title: string; isText?: boolean }) => (
    <th class={each.isText ? '' : 'n'} aria-sort={key === each.key ? (sign > 0 ? 'ascending' : 'descending') : undefined}>
      <button type="button" title={each.title} onClick={() => change({ sort: key === each.key && sign > 0 ? `-${each.key}` : each.key })}>
        {middle(each.title, 26)}{key === each.key ? (sign > 0 ? ' ↑' : ' ↓') : ''}
      </button>
    </th>
  )
  const cell = (each: Column, of: Run[]) => {
    const isSetting = each.key in (of[0].settings ?? {})
    const same = isSetting && of.every((run) => each.value(run) === each.value(of[0])) ? `${each.key}=${plain(each.value(of[0]))}` : undefined
    const filter = same ? () => change({ q: [...(words.get('q') ?? '').split(/\s+/).filter((word) => word && word !== same), same].join(' ') }) : undefined
    return <td class={`${each.isText ? '' : 'n'} ${each.key} ${same ? 'filter' : ''}`} title={same && `${each.key}=${each.value(of[0])}: show these runs alone`} onClick={filter}>{of.length > 1 ? summary(each, of) : each.show(of[0])}</td>
  }
  const row = (label: string, of: Run[], kind = ''): VNode => {
    const [places, readable, alarms] = [of.map((run) => run.place), of.map((run) => run.name), of.reduce((sum, run) => sum + (run.alarms ?? 0), 0)]
    const drawn = readable.filter((name) => chosen.includes(name))
    const [isPinned, isHidden] = [places.every((each) => pinned.includes(each)), places.every((each) => hidden.includes(each))]
    const isOpen = opened.includes(label)
    const dot = drawn.length ? colors.get(drawn[0]) : undefined
    return (
      <tr key={`${kind} ${places[0]}`} class={`${drawn.length ? 'chosen' : ''} ${kind}`}>
        <td><input type="checkbox" aria-label={label} checked={drawn.length === of.length} indeterminate={drawn.length > 0 && drawn.length < of.length} onChange={() => onChoose(toggledIn(chosen, readable))} /></td>
        <td class="name" title={of.map((run) => `${run.name}\n${run.place}`).join('\n')} onClick={() => onChoose(toggledIn(chosen, readable))}>
          {of.length > 1 && <button type="button" class="icon" aria-expanded={isOpen} aria-label={`Seeds of ${label}`} onClick={(event) => { event.stopPropagation(); open(toggledIn(opened, [label])) }}>{isOpen ? '▾' : '▸'}</button>}
          <i class="dot" style={{ background: dot ? `var(${dot})` : 'var(--line)' }} />
          {middle(label, 36)}{of.length > 1 && <span class="dim"> {of.length} seeds</span>}
          {alarms > 0 && <a class="badge" href={link('alarms', { run: of.find((run) => run.alarms)!.name })} title="Alarms: what its rules have found" onClick={(event) => event.stopPropagation()}>{alarms}</a>}
        </td>
        {of[0].problem
          ? <td colSpan={columns.length}><p class="problem">{of[0].problem}</p></td>
          : columns.map((each) => cell(each, of))}
        <td class="n">
          {!of[0].problem && of.length === 1 && <><a href={link('config', { run: label })}>Settings</a> <a href={link('answers', { run: label })}>Answers</a></>}
          <button type="button" class="icon" aria-pressed={isPinned} aria-label="Pin" title="Keep at the top" onClick={() => pin(places)}>{isPinned ? '★' : '☆'}</button>
          <button type="button" class="icon" aria-pressed={isHidden} aria-label="Hide" title="Hide in this browser" onClick={() => {
            if (!isHidden && drawn.length) onChoose(toggledIn(chosen, drawn))
            hide(places)
          }}>{isHidden ? '+' : '✕'}</button>
        </td>
      </tr>
    )
  }
  return (
    <Panel title="Runs" unit={`${chosen.length} of ${runs.length} drawn`} class="runs" side={
      <>
        {away > 0 && <button type="button" onClick={() => showHidden(!showsHidden)}>{showsHidden ? 'Without' : 'With'} {away} hidden</button>}
        {settings.length > FEW && <button type="button" onClick={() => change({ settings: isWide ? null : 'all' })}>{isWide ? 'Fewer settings' : `All ${settings.length} settings that differ`}</button>}
      </>
    }>
      <div class="bar">
        <input type="search" aria-label="Search runs" placeholder="name, or conditions such as optim.lr=2e-4 accuracy>0.5" title={SEARCH} value={words.get('q') ?? ''} onInput={(event) => change({ q: event.currentTarget.value })} />
        {recipes.length > 1 && (
          <label class="field">
            Recipe
            <select value={words.get('recipe') ?? ''} onChange={(event) => change({ recipe: event.currentTarget.value })}>
              <option value="">all</option>
              {recipes.map((name) => <option value={name}>{name}</option>)}
            </select>
          </label>
        )}
        <Choice label="State" value={words.get('state') ?? ''} options={STATES} onChange={(state) => change({ state })} />
        <label class="field" title={`Runs whose settings are the same but for the seed are one line and one row. ${INTERVAL}`}>
          <input type="checkbox" checked={isTogether} onChange={() => change({ seeds: isTogether ? null : 'mean' }, true)} />
          Group seeds
        </label>
      </div>
      <div class="scroll">
        <table>
          <thead>
            <tr>
              <th><input type="checkbox" aria-label="Draw all" checked={hasAll} onChange={() => onChoose(toggledIn(chosen, names))} /></th>
              {head({ key: 'name', title: 'Name', isText: true })}
              {columns.map(head)}
              <th />
            </tr>
          </thead>
          <tbody>
            {groups.flatMap(({ label, runs: of }) => [
              row(label, of),
              ...(of.length > 1 && opened.includes(label) ? [...of].sort((a, b) => inOrder([a], [b])).map((run) => row(run.name, [run], 'seed')) : []),
            ])}
          </tbody>
        </table>
        {!shown.length && <Empty>No run is called so, has such a setting among those in which the runs differ, or is in this state.</Empty>}
      </div>
    </Panel>
  )
}
