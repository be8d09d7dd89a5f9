// Runs side by side: curves, differences of settings, and the comparison of two.
import { useMemo, useRef, useState } from 'preact/hooks'
import { load, ofStep, query, useData, type Curves, type Run } from './api'
import { along, axes, Chart, color, pointer, RUN_COLORS, save, savePicture, tip, upward, useTheme, type Option } from './chart'
import { middle, number, type Unit } from './format'
import { Choice, Empty, Legend, Panel, Problem, Problems } from './parts'
import { change, link } from './route'
import { RunsTable } from './runs'
import { average, grouped, INTERVAL, type Point } from './seeds'

interface Spec {
  id: string
  title: string
  unit: Unit
  says: string
  /** Figures drawn, each by the first of these names that a run has; the second is dashed. */
  lines: string[][]
  words?: string[]
}

const SPECS: Spec[] = [
  { id: 'held-out', title: 'Held-out accuracy', unit: 'share', says: 'pass@1', lines: [] },
  { id: 'accuracy', title: 'Accuracy in training', unit: 'share', says: 'all answers', lines: [['sampling/accuracy', 'score/accuracy/mean']] },
  { id: 'reward', title: 'Reward', unit: 'plain', says: 'mean, answers trained on', lines: [['score/reward/mean']] },
  { id: 'length', title: 'Length of an answer', unit: 'tokens', says: 'tokens, mean', lines: [['length/response/mean']] },
  { id: 'entropy', title: 'Entropy', unit: 'nats', says: 'nats a token', lines: [['actor/entropy']] },
  { id: 'clip', title: 'Clipped tokens', unit: 'share', says: 'share', lines: [['actor/clip_high', 'actor/clip'], ['actor/clip_low']], words: ['above', 'below'] },
  { id: 'grad-norm', title: 'Gradient norm', unit: 'plain', says: 'before clipping', lines: [['actor/grad_norm']] },
  { id: 'mismatch', title: 'Sampler against trainer', unit: 'nats', says: 'mean |Δ|, nats', lines: [['mismatch/abs_delta']] },
  { id: 'keep-rate', title: 'Kept groups', unit: 'share', says: 'share that passed the filter', lines: [['sampling/keep_rate']] },
  { id: 'truncated', title: 'Cut off at the limit', unit: 'share', says: 'answers trained on', lines: [['length/truncated']] },
  { id: 'throughput', title: 'Throughput', unit: 'count', says: 'tokens a second', lines: [['throughput/tokens_per_s']] },
  { id: 'step-time', title: 'Time of a step', unit: 'seconds', says: 'evaluation included', lines: [['time/step_s']] },
]
const X = { step: 'step', tokens: 'tokens generated', time: 'time' } as const
type XName = keyof typeof X
const X_UNITS: Record<XName, Unit> = { step: 'count', tokens: 'tokens', time: 'seconds' }
const namesOf = (spec: Spec) => (spec.id === 'held-out' ? ['eval/*'] : spec.lines.flat())
const FEW = 250
/** Points of a large chart, of all its runs together. */
const MANY = 30_000

interface Line {
  run: string
  name: string
  color: string
  dashed: boolean
  marks: boolean
  points: Point[]
  /** What is drawn: no spike is lost where steps share a point. */
  drawn: [number, number][]
  /** Half of the interval at each point, where the line is the mean of several runs. */
  halves?: number[]
}
/** Runs that are one line. */
interface Entry {
  label: string
  color: string
  names: string[]
}
/** Lines that a tooltip names: those nearest to the pointer. */
const NAMED = 8

/** Exponential moving average over about a share `by` of the steps, its weights normalised from the first on. */
function smooth(points: Point[], by: number): [number, number][] {
  const decay = 1 - 1 / Math.max(by * points.reduce((sum, point) => sum + point[3], 0), 1)
  let sum = 0
  let weight = 0
  return points.map(([x, y, , rows]) => {
    const kept = decay ** rows
    sum = kept * sum + (1 - kept) * y
    weight = kept * weight + (1 - kept)
    return [x, sum / weight]
  })
}

function pointsOf(curves: Curves, name: string, x: XName): Point[] {
  const xs = x === 'step' ? curves.step : x === 'tokens' ? curves.tokens : curves.time_s
  const [first, second] = curves.extremes[name] ?? []
  const found: Point[] = []
  ofStep(curves, name).forEach((value, row) => {
    if (value !== null) found.push([xs[row], value, curves.step[row], curves.rows[row], first?.[row] ?? value, second?.[row] ?? value])
  })
  return found
}

/** Names of the held-out figures, one a data source: pass@1, or the mean score where there is none. */
function heldOut(curves: Curves): [string, string][] {
  const bySource = new Map<string, string>()
  for (const name of Object.keys(curves.values)) {
    const match = /^eval\/(.*)\/(pass@1|avg@\d+)$/.exec(name)
    if (match && (match[2] === 'pass@1' || !bySource.has(match[1]))) bySource.set(match[1], name)
  }
  return [...bySource]
}

function linesOf(spec: Spec, all: Record<string, Curves>, entries: Entry[], x: XName, by: number): Line[] {
  const found: Line[] = []
  for (const each of entries) {
    const curves = each.names.flatMap((name) => all[name] ?? [])
    const add = (name: string, label: string, dashed: boolean, marks: boolean) => {
      const traces = curves.map((one) => pointsOf(one, name, x)).filter((points) => points.length)
      const smoothed = () => (marks || by === 0 ? traces : traces.map((points) => smooth(points, by)))
      const mean = traces.length > 1 ? average(smoothed(), x === 'step') : { points: traces[0] ?? [] }
      const drawn = mean.points.flatMap(([at, , , , a, b]): [number, number][] => (a === b ? [[at, a]] : [[at, a], [at, b]]))
      found.push({ run: each.label, name: label, dashed, marks, color: color(each.color), ...mean, drawn })
    }
    if (spec.id === 'held-out') {
      const sources = [...new Map(curves.flatMap(heldOut))]
      sources.forEach(([source, name], n) => add(name, sources.length > 1 ? source : '', n > 0, true))
    }
    spec.lines.forEach((candidates, n) => {
      const name = candidates.find((candidate) => curves.some((one) => one.values[candidate]?.some((v) => v !== null)))
      if (name) add(name, spec.words?.[n] ?? '', n > 0, false)
    })
  }
  return found
}

/** The least and the largest value of the lines between two places of the horizontal axis; bands may add half of their distance. */
function rangeOf(lines: Line[], from: number, to: number, unit: Unit): [number, number] {
  let [low, high, least, most] = [Infinity, -Infinity, Infinity, -Infinity]
  for (const { points, drawn, halves } of lines) {
    for (const [x, y] of drawn) if (x >= from && x <= to) [low, high] = [Math.min(low, y), Math.max(high, y)]
    halves?.forEach((half, n) => {
      const [x, y] = points[n]
      if (x >= from && x <= to) [least, most] = [Math.min(least, y - half), Math.max(most, y + half)]
    })
  }
  if (low > high) return [0, 1]
  const room = (high - low) / 2 || Infinity
  const [floor, ceiling] = unit === 'share' ? [Math.min(low, 0), Math.max(high, 1)] : [-Infinity, Infinity]
  return [Math.min(low, Math.max(least, low - room, floor)), Math.max(high, Math.min(most, high + room, ceiling))]
}

/** The interval around a mean, as two stacked areas of which the lower one is not seen. */
function bandOf({ points, halves, color: fill }: Line, stack: string): Option[] {
  const shared = { type: 'line', stack, stackStrategy: 'all', symbol: 'none', silent: true, lineStyle: { opacity: 0 }, emphasis: { disabled: true } }
  return [
    { ...shared, data: points.map(([x, y], n) => [x, y - halves![n]]) },
    { ...shared, data: points.map(([x], n) => [x, 2 * halves![n]]), areaStyle: { color: fill, opacity: 0.16 } },
  ]
}

function optionOf(spec: Spec, lines: Line[], x: XName, by: number, isLarge: boolean): Option {
  const series = lines.flatMap((line, n): Option[] => {
    const style = { color: line.color, width: 2, type: line.dashed ? 'dashed' : 'solid' }
    const shared = { type: 'line', symbol: 'circle', symbolSize: 5, color: line.color, emphasis: { disabled: true } }
    if (line.marks || by === 0 || line.halves) {
      return [...(line.halves ? bandOf(line, `${n}`) : []), { ...shared, showSymbol: line.marks || line.points.length < 2, data: line.drawn, lineStyle: style }]
    }
    return [
      { ...shared, showSymbol: false, silent: true, data: line.drawn, lineStyle: { ...style, width: 1, opacity: 0.28 } },
      { ...shared, showSymbol: line.points.length < 2, data: smooth(line.points, by), lineStyle: style },
    ]
  })
  const several = new Set(lines.map((each) => each.run)).size > 1
  const [min, max] = rangeOf(lines, 0, Infinity, spec.unit)
  const last = lines.reduce((most, line) => Math.max(most, line.points[line.points.length - 1]?.[0] ?? 0), 0)
  const option = axes({ min: 0, max: last || 1 }, { min, max }, X_UNITS[x], spec.unit, isLarge ? 8 : 4)
  option.series = series
  option.tooltip.formatter = (given: Option[]) => {
    const at = given[0]?.data?.[0] as number
    const rows = lines.flatMap((line) => {
      const n = closest(line.points, at)
      if (n < 0) return []
      const [, y, step, rows, a, b] = line.points[n]
      const label = [several ? middle(line.run, 40) : '', line.name].filter(Boolean).join(' · ') || spec.title
      const range = line.halves?.[n] ? ` ± ${number(line.halves[n], spec.unit)}` : a === b ? '' : ` (${number(Math.min(a, b), spec.unit)} to ${number(Math.max(a, b), spec.unit)})`
      const steps = Number.isNaN(step) || (step === at && rows === 1) ? '' : `, ${rows > 1 ? `steps ${step - rows + 1} to` : 'step'} ${step}`
      return [{ color: line.color, label: label + steps, value: number(y, spec.unit) + range, y }]
    })
    const far = rows.sort((a, b) => Math.abs(a.y - pointer.y) - Math.abs(b.y - pointer.y)).splice(NAMED).length
    rows.sort((a, b) => b.y - a.y)
    return tip(x === 'step' ? `step ${at}` : `${X[x]}: ${number(at, X_UNITS[x])}`, far ? [...rows, { label: `and ${far} more, farther from the pointer`, value: '' }] : rows)
  }
  if (isLarge) {
    option.dataZoom = [{ type: 'inside' }]
    option.xAxis.name = X[x]
    option.xAxis.nameLocation = 'middle'
    option.xAxis.nameGap = 26
    option.xAxis.nameTextStyle = { color: color('--dim'), fontSize: 12 }
    option.grid.bottom = 28
  }
  return option
}

/** The points of a chart as a table: CSV in which each cell that may hold a comma is quoted. */
function csvOf(spec: Spec, lines: Line[], x: XName): Blob {
  const quoted = (text: string) => `"${text.replace(/"/g, '""')}"`
  const hasBands = lines.some((line) => line.halves)
  const head = ['run', 'figure', 'step', ...(x === 'step' ? [] : [x === 'time' ? 'time_s' : x]), 'value', ...(hasBands ? ['half_interval'] : [])].join(',')
  const rows = lines.flatMap((line) => line.points.map(([at, y, step], n) =>
    [quoted(line.run), quoted(line.name || spec.title), Number.isNaN(step) ? '' : step, ...(x === 'step' ? [] : [at]), y, ...(hasBands ? [line.halves?.[n] ?? ''] : [])].join(',')))
  return new Blob([[head, ...rows].join('\r\n'), '\r\n'], { type: 'text/csv' })
}

/** Index of the nearest point; -1 without any. */
function closest(points: Point[], x: number): number {
  let best = -1
  points.forEach((point, n) => {
    if (best < 0 || Math.abs(point[0] - x) < Math.abs(points[best][0] - x)) best = n
  })
  return best
}

function Curve(props: {
  spec: Spec
  all: Record<string, Curves>
  entries: Entry[]
  x: XName
  by: number
  isLarge: boolean
  onLarge: () => void
  compared: Comparison | null
}) {
  const theme = useTheme()
  const { spec, all, entries, x, by, isLarge } = props
  const [lines, option] = useMemo(() => {
    const made = linesOf(spec, all, entries, x, by)
    return [made, optionOf(spec, made, x, by, isLarge)]
  }, [spec, all, entries, x, by, isLarge, theme])
  const height = isLarge ? 420 : 148
  const legend = lines.map((line) => ({ color: line.color, label: [middle(line.run, 36), line.name].filter(Boolean).join(' · ') }))
  return (
    <Panel
      title={spec.title}
      unit={spec.says}
      figures={spec.id === 'held-out' ? ['eval/SOURCE/pass@1'] : spec.lines.flat()}
      class={isLarge ? 'large' : ''}
      side={
        <>
          {isLarge && <button type="button" title="All steps of these curves as a table" onClick={async () => save(`${spec.title}.csv`, csvOf(spec, linesOf(spec, await load(query('series', { runs: entries.flatMap((each) => each.names), names: namesOf(spec), points: 1e9 })), entries, x, 0), x))}>CSV</button>}
          {isLarge && <button type="button" title="This chart as a picture" onClick={(event) => savePicture(event.currentTarget.closest('.panel')!, spec.title, legend)}>PNG</button>}
          <button type="button" class="icon" aria-label={isLarge ? 'Smaller' : 'Larger'} onClick={props.onLarge}>
            {isLarge ? '✕' : '⤢'}
          </button>
        </>
      }
    >
      {lines.some((line) => line.points.length)
        ? <Chart option={option} height={height} label={spec.title} onZoom={(from, to) => ({ xAxis: along(from, to, X_UNITS[x]), yAxis: upward(...rangeOf(lines, from, to, spec.unit), spec.unit, 8) })} />
        : <div class="chart none" style={{ height: `${height}px` }}>{missing(spec)}</div>}
      {spec.id === 'held-out' && props.compared?.step != null && Object.entries(props.compared.sources).map(([source, each]) => (
        <div class="caption" title={props.compared!.verdict ?? ''}>
          {Object.keys(props.compared!.sources).length > 1 ? `${source}: ` : ''}B − A, step {props.compared!.step}: <b>{points(each.difference)}</b> points, 95 %: {points(each.low)} to {points(each.high)}
        </div>
      ))}
      {spec.words && lines.length > 1 && (
        <div class="caption">{spec.words[0]} the bound: solid, {spec.words[1]}: dashed</div>
      )}
    </Panel>
  )
}

function missing(spec: Spec): string {
  if (spec.id === 'held-out') return 'No evaluation yet (evaluation.every, data.eval_files)'
  return `Not recorded: ${spec.lines[0][0]}`
}

export function Overview({ runs, words }: { runs: Run[]; words: URLSearchParams }) {
  const chosen = words.getAll('runs').filter((name) => runs.some((each) => each.name === name))
  const waiting = runs.filter((each) => chosen.includes(each.name) && each.waiting)
  const x = (words.get('x') ?? 'step') as XName
  const by = Math.min(Number(words.get('smooth') ?? '0.05'), 0.3)
  const large = words.get('chart')
  const more = words.getAll('more')
  const isTogether = words.get('seeds') === 'mean'
  const groups = grouped(runs, isTogether).filter((each) => each.runs.some((run) => chosen.includes(run.name)))
  const colors = useColors(groups.map((each) => each.key))
  const named = groups.map((each) => [each.label, each.key, ...each.runs.map((run) => run.name).filter((name) => chosen.includes(name))])
  // The same object while the same runs are drawn: charts are made anew for another one.
  const entries = useMemo(() => named.map(([label, key, ...names]): Entry => ({ label: names.length > 1 ? `${label} (${names.length} seeds)` : names[0], color: colors.get(key)!, names })), [JSON.stringify(named), colors])
  const colorOf = new Map(entries.flatMap(({ names, color: made }) => names.map((name) => [name, made])))
  const ask = (specs: Spec[], points: number) =>
    useData<Record<string, Curves>>(chosen.length && specs.length ? query('series', { runs: chosen, names: [...new Set(specs.flatMap(namesOf))], points }) : null, chosen)
  const specs = useMemo(() => [
    ...SPECS,
    ...more.map((name): Spec => ({ id: name, title: name, unit: unitOf(name), says: '', lines: [[name]] })),
  ], [more.join('\n')])
  const { data, error } = ask(specs, FEW)
  const finer = ask(specs.filter((each) => each.id === large), Math.ceil(MANY / chosen.length))
  const [a, b] = chosen.length === 2 ? chosen : [null, null]
  const at = words.get('at')
  const compared = useData<Comparison>(a && b ? query('comparison', { a, b, step: at }) : null, chosen)
  return (
    <div class="page">
      <RunsTable runs={runs} chosen={chosen} colors={colorOf} words={words} onChoose={(next) => change({ runs: next.length ? next : chosen.slice(0, 1) }, true)} />
      <div class="bar">
        <Choice label="Horizontal axis" value={x} options={[['step', 'Steps'], ['tokens', 'Tokens'], ['time', 'Time']]} onChange={(value) => change({ x: value })} />
        <label class="field">
          Smoothing
          <input type="range" min="0" max="0.3" step="0.01" value={by} aria-label="Smoothing" title="Share of the points that an average goes over" onInput={(event) => change({ smooth: event.currentTarget.value })} />
          <output>{Math.round(100 * by)} %</output>
        </label>
        <MoreFigures runs={chosen} more={more} />
      </div>
      {error && <Problem>{error}</Problem>}
      {data && <Problems lines={Object.values(data).flatMap((each) => each.problems)} />}
      {entries.length > 1 && <Legend items={entries.map((each) => ({ color: `var(${each.color})`, label: middle(each.label, 48) }))} />}
      {entries.some((each) => each.names.length > 1) && <p class="dim note">{INTERVAL}</p>}
      {waiting.map((each) => <Empty>{each.waiting}</Empty>)}
      {data && waiting.length < chosen.length && (
        <div class="curves">
          {specs.filter((spec) => !large || spec.id === large).map((spec) => (
            <Curve key={spec.id} spec={spec} all={spec.id === large && !finer.stale && finer.data ? finer.data : data} entries={entries} x={x} by={by} isLarge={spec.id === large} onLarge={() => change({ chart: large ? null : spec.id }, true)} compared={a && !compared.stale ? compared.data : null} />
          ))}
        </div>
      )}
      {a && b
        ? <Pair a={a} b={b} found={compared.stale ? null : compared.data} error={compared.error} />
        : <Empty>Choose two runs to see in which settings they differ, and whether one is better on held-out problems.</Empty>}
    </div>
  )
}

/** A colour for each line, which it keeps while it is drawn, whatever else comes and goes. */
function useColors(keys: string[]): Map<string, string> {
  const held = useRef(new Map<string, string>())
  return useMemo(() => {
    const next = new Map([...held.current].filter(([name]) => keys.includes(name)))
    for (const name of keys.filter((each) => !next.has(each))) {
      const taken = new Set(next.values())
      next.set(name, RUN_COLORS.find((each) => !taken.has(each)) ?? RUN_COLORS[next.size % RUN_COLORS.length])
    }
    return (held.current = next)
  }, [keys.join('\n')])
}

function unitOf(name: string): Unit {
  if (/_us_per_token$/.test(name)) return 'plain'
  if (/^time\/|_s$/.test(name) && !/_per_s$/.test(name)) return 'seconds'
  if (/gib$/.test(name)) return 'gib'
  if (/tokens|length\/(response|prompt)|groups|answers/.test(name)) return 'count'
  return 'plain'
}

function MoreFigures({ runs, more }: { runs: string[]; more: string[] }) {
  const [isOpen, open] = useState(false)
  const { data } = useData<string[]>(isOpen ? query('names', { runs }) : null, [])
  return (
    <label class="field more">
      More figures
      <input
        list="figures"
        placeholder="name, such as time/update_s"
        onFocus={() => open(true)}
        onChange={(event) => {
          const name = event.currentTarget.value.trim()
          if (data?.includes(name) && !more.includes(name)) change({ more: [...more, name], chart: null }, true)
          event.currentTarget.value = ''
        }}
      />
      <datalist id="figures">{data?.map((name) => <option value={name} />)}</datalist>
      {more.length > 0 && <button type="button" onClick={() => change({ more: [] }, true)}>Clear</button>}
    </label>
  )
}

interface Paired {
  problems: number
  a: number
  b: number
  difference: number
  low: number
  high: number
  p_sign_flips: number
  won: number
  tied: number
  lost: number
}
interface Comparison {
  step: number | null
  steps: number[]
  sources: Record<string, Paired>
  notes: string[]
  verdict: string | null
}

function Pair({ a, b, found, error }: { a: string; b: string; found: Comparison | null; error: string | null }) {
  const settings = useData<{ key: string; a: unknown; b: unknown }[]>(query('difference', { a, b }), [])
  return (
    <div class="pair">
      <Panel
        title="Held-out comparison"
        unit={`A = ${a}, B = ${b}`}
        side={found && found.steps.length > 1 && (
          <select aria-label="Step of the comparison" value={String(found.step)} onChange={(event) => change({ at: event.currentTarget.value })}>
            {found.steps.map((each) => <option value={String(each)}>after step {each}</option>)}
          </select>
        )}
      >
        {error && <Problem>{error}</Problem>}
        {found && found.step === null && <Empty>The two runs have no evaluation at the same step.</Empty>}
        {found && found.verdict && (
          <>
            <p class="verdict">{found.verdict}</p>
            <table>
              <thead><tr><th>Source</th><th class="n">Problems</th><th class="n">A</th><th class="n">B</th><th class="n">B − A</th><th>95 % interval, points</th><th class="n">p</th></tr></thead>
              <tbody>
                {Object.entries(found.sources).map(([source, each]) => (
                  <tr>
                    <td>{source}</td>
                    <td class="n">{each.problems}</td>
                    <td class="n">{number(each.a, 'share')}</td>
                    <td class="n">{number(each.b, 'share')}</td>
                    <td class="n">{points(each.difference)}</td>
                    <td><Interval pair={each} /></td>
                    <td class="n">{each.p_sign_flips < 0.001 ? '< 0.001' : each.p_sign_flips.toFixed(3)}</td>
                  </tr>
                ))}
              </tbody>
            </table>
            {found.notes.map((note) => <p class="dim">{note}</p>)}
          </>
        )}
      </Panel>
      <Panel title="Settings that differ" unit={settings.data && !settings.stale ? String(settings.data.length) : ''} side={<a href={link('config', { run: a, other: b })}>All settings</a>}>
        {settings.error && <Problem>{settings.error}</Problem>}
        {settings.data && !settings.stale && (settings.data.length
          ? (
            <table class="settings">
              <thead><tr><th>Setting</th><th>A</th><th>B</th></tr></thead>
              <tbody>
                {settings.data.map((each) => (
                  <tr><td><code>{each.key}</code></td><td>{said(each.a)}</td><td>{said(each.b)}</td></tr>
                ))}
              </tbody>
            </table>
          )
          : <Empty>Both runs have the same settings.</Empty>)}
      </Panel>
    </div>
  )
}

const points = (value: number) => `${value < 0 ? '−' : '+'}${Math.abs(100 * value).toFixed(1)}`
const said = (value: unknown) => (value === null || value === undefined ? '–' : String(value))

function Interval({ pair }: { pair: Paired }) {
  const reach = Math.max(Math.abs(pair.low), Math.abs(pair.high), 0.01) * 1.15
  const at = (value: number) => `${50 + (50 * value) / reach}%`
  return (
    <span class="interval">
      <span class="track">
        <i class="zero" />
        <i class="range" style={{ left: at(pair.low), width: `calc(${at(pair.high)} - ${at(pair.low)})` }} />
        <i class="middle" style={{ left: at(pair.difference) }} />
      </span>
      {points(pair.low)} to {points(pair.high)}
    </span>
  )
}
