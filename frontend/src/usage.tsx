// What a run's processes and their machine used over time: a small chart each, over the same axis.
import { useMemo } from 'preact/hooks'
import type { Values } from './api'
import { axes, Chart, color, RUN_COLORS, tip, useTheme, type Option } from './chart'
import { number, type Unit } from './format'
import { Empty, Legend, Panel } from './parts'

/** Columns by name, with `time_s` and `over_s`. */
export type Usage = Record<string, Values>
interface Spec {
  title: string
  says: string
  unit: Unit
  about: [meaning: string, healthy: string]
  /** Names of the lines that are drawn: a pattern whose group is what a line is called. */
  lines: RegExp
  /** The end of the vertical axis, where it is not that of the data. */
  most?: number
}

const SPECS: Spec[] = [
  { title: 'CPU by role', about: ['Cores that the processes of a role keep busy, with all that they start.', 'the role that the step waits for is busy; the learner uses run.threads cores'], says: '100 % = one core', unit: 'share', lines: /^role\/(.+)\/cores$/ },
  { title: 'Memory by role', about: ['Resident memory of a role’s processes; a page that several share counts in each.', 'steady after the first steps; a rise that goes on is a leak'], says: 'GiB, resident', unit: 'gib', lines: /^role\/(.+)\/gib$/ },
  { title: 'Processes by role', about: ['Processes of a role that are alive.', 'steady; sandboxed programs come and go'], says: 'number', unit: 'count', lines: /^role\/(.+)\/processes$/ },
  { title: 'CPU of the machine', about: ['Busy share of all cores, by whatever runs on the machine.', 'near that of the roles; more means that others use the machine'], says: 'share of all cores', unit: 'share', lines: /^(machine)\/cpu$/, most: 1 },
  { title: 'Memory of the machine', about: ['Memory that is not available, of all that runs on the machine.', 'well below the machine’s memory'], says: 'GiB in use', unit: 'gib', lines: /^(machine)\/gib$/ },
  { title: 'Network of the machine', about: ['Traffic of all interfaces but loopback.', 'low with local processes; bursts when models are fetched or weights and checkpoints are sent'], says: 'MiB a second, without loopback', unit: 'plain', lines: /^network\/(.+)_mib_per_s$/ },
  { title: 'GPU utilisation', about: ['Share of the time in which a GPU worked, as its driver reports it.', 'high while its role works; engines and learner on one GPU take turns'], says: 'share of the time', unit: 'share', lines: /^(gpu\/\d+)\/busy$/, most: 1 },
  { title: 'GPU memory', about: ['Memory of a GPU that is in use, by whatever process.', 'steady after the first steps, below its limit'], says: 'GiB in use', unit: 'gib', lines: /^(gpu\/\d+)\/gib$/ },
]

export function UsageCharts({ usage }: { usage: Usage }) {
  const theme = useTheme()
  const drawn = useMemo(() => SPECS.map((spec) => ({ spec, ...draw(spec, usage) })), [usage, theme])
  if (!usage.time_s) return <Empty>No usage.jsonl: the run is a few seconds old, or of an older Winnow.</Empty>
  return (
    <div class="curves">
      {drawn.filter((each) => each.names.length).map(({ spec, names, option }) => (
        <Panel title={spec.title} unit={spec.says} about={spec.about}>
          <Chart option={option} height={148} label={`${spec.title} over time`} />
          {names.length > 1 && <Legend items={names.map((label, n) => ({ color: `var(${RUN_COLORS[n]})`, label }))} />}
        </Panel>
      ))}
    </div>
  )
}

function draw(spec: Spec, usage: Usage): { names: string[]; option: Option } {
  const lines = Object.keys(usage).flatMap((name) => {
    const match = spec.lines.exec(name)
    return match ? [{ label: match[1].replace('/', ' '), values: usage[name] }] : []
  })
  const [times, spans] = [usage.time_s ?? [], usage.over_s ?? []] as number[][]
  const start = times.length ? times[0] - spans[0] : 0
  // While the run stood still there are no samples: the line breaks there.
  const breaks = times.flatMap((time, n) => (n && time - spans[n] > times[n - 1] + 1 ? [n] : []))
  const most = lines.flatMap((line) => line.values).reduce((before: number, each) => Math.max(before, each ?? 0), 0)
  const last = times.length ? times[times.length - 1] - start : 1
  const option = axes({ min: 0, max: last }, { min: 0, max: spec.most ?? most }, 'seconds', spec.unit)
  option.series = lines.map(({ values }, n) => {
    const points: [number, number | null][] = times.map((time, row) => [time - start, values[row]])
    breaks.forEach((row, before) => points.splice(row + before, 0, [times[row] - spans[row] - start, null]))
    return {
      type: 'line', showSymbol: points.length < 2, data: points, color: color(RUN_COLORS[n % RUN_COLORS.length]),
      lineStyle: { width: 1.5 }, emphasis: { disabled: true },
    }
  })
  option.tooltip.formatter = (given: Option[]) => tip(
    new Date((start + given[0].data[0]) * 1000).toLocaleString('sv-SE'),
    given.filter((each) => each.data[1] != null).map((each) => (
      { color: each.color, label: lines[each.seriesIndex].label, value: number(each.data[1], spec.unit) })),
  )
  return { names: lines.map((line) => line.label), option }
}
