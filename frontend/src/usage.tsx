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
  /** Names of the lines that are drawn: a pattern whose group is what a line is called. */
  lines: RegExp
  /** The end of the vertical axis, where it is not that of the data. */
  most?: number
}

const SPECS: Spec[] = [
  { title: 'CPU by role', says: '100 % = one core', unit: 'share', lines: /^role\/(.+)\/cores$/ },
  { title: 'Memory by role', says: 'GiB, resident', unit: 'gib', lines: /^role\/(.+)\/gib$/ },
  { title: 'Processes by role', says: 'number', unit: 'count', lines: /^role\/(.+)\/processes$/ },
  { title: 'CPU of the machine', says: 'share of all cores', unit: 'share', lines: /^(machine)\/cpu$/, most: 1 },
  { title: 'Memory of the machine', says: 'GiB in use', unit: 'gib', lines: /^(machine)\/gib$/ },
  { title: 'Network of the machine', says: 'MiB a second, without loopback', unit: 'plain', lines: /^network\/(.+)_mib_per_s$/ },
  { title: 'GPU utilisation', says: 'share of the time', unit: 'share', lines: /^(gpu\/\d+)\/busy$/, most: 1 },
  { title: 'GPU memory', says: 'GiB in use', unit: 'gib', lines: /^(gpu\/\d+)\/gib$/ },
]

export function UsageCharts({ usage }: { usage: Usage }) {
  const theme = useTheme()
  const drawn = useMemo(() => SPECS.map((spec) => ({ spec, ...draw(spec, usage) })), [usage, theme])
  if (!usage.time_s) return <Empty>No usage.jsonl: the run is a few seconds old, or of an older Winnow.</Empty>
  return (
    <div class="curves">
      {drawn.filter((each) => each.names.length).map(({ spec, names, option }) => (
        <Panel title={spec.title} unit={spec.says}>
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
