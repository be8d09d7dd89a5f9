// The machine's side of a run: what its processes use over time, starts, checkpoints and the log.
import { useMemo } from 'preact/hooks'
import { query, useData, type Curves, type Run } from './api'
import { axes, Chart, color, tip, useTheme, type Option } from './chart'
import { number } from './format'
import { Choice, Empty, Panel, Problem, Problems, RunChoice } from './parts'
import { change } from './route'
import { UsageCharts, type Usage } from './usage'

interface Line {
  time: string
  level: string
  where: string
  text: string
}
interface Data {
  processes: { name: string; count: number; field: string | null }[]
  starts: { name: string; time_s: number }[]
  checkpoints: number[]
  machine: Record<string, string | number>
  log: { lines: Line[]; is_cut: boolean }
  usage: Usage
  problems: string[]
}
const MEMORY: [string, string][] = [['memory/peak_gib', 'driver'], ['ranks/peak_gib', 'largest rank']]

export function System({ runs, words }: { runs: Run[]; words: URLSearchParams }) {
  const theme = useTheme()
  const run = words.get('run') ?? ''
  const level = words.get('level') === 'all' ? 'all' : 'warnings'
  const { data, error } = useData<Data>(query('run/system', { run }), [run])
  const curves = useData<Record<string, Curves>>(query('series', { runs: [run], names: ['memory/*', 'ranks/*'] }), [run])
  const found = curves.data?.[run]
  const option = useMemo(() => found && memoryOption(found), [found, theme])
  const warnings = data?.log.lines.filter((line) => line.level !== 'INFO') ?? []
  const shown = level === 'all' ? (data?.log.lines ?? []) : warnings
  return (
    <div class="page">
      <div class="bar"><RunChoice runs={runs} run={run} /></div>
      {error && <Problem>{error}</Problem>}
      {data && <Problems lines={data.problems} />}
      {data && <UsageCharts usage={data.usage} />}
      <div class="two">
        <Panel title="Highest memory" unit="GiB, so far, by step">
          {option ? <Chart option={option} height={180} label="Memory by step" /> : <Empty>No step is done yet.</Empty>}
        </Panel>
        {data && (
          <Panel title="Processes and machine">
            <div class="facts">
              <table>
                <tbody>
                  {data.processes.map((each) => <tr><td>{each.name}</td><td class="n">{each.count}</td></tr>)}
                  <tr><td>checkpoints kept</td><td class="n">{data.checkpoints.length ? data.checkpoints.map((each) => `step ${each}`).join(', ') : 'none yet'}</td></tr>
                  {data.starts.map((each) => <tr><td>{each.name === 'start' ? 'started' : each.name}</td><td class="n">{new Date(each.time_s * 1000).toLocaleString('sv-SE')}</td></tr>)}
                </tbody>
              </table>
              <table>
                <tbody>{Object.entries(data.machine).map(([name, value]) => <tr><td>{name}</td><td class="n">{value}</td></tr>)}</tbody>
              </table>
            </div>
            {!Object.keys(data.machine).length && <p class="dim note">The versions of its software come with its first checkpoint.</p>}
          </Panel>
        )}
      </div>
      {data && (
        <Panel title="Log" unit={`${warnings.length} ${warnings.length === 1 ? 'warning' : 'warnings'} among ${data.log.lines.length} lines${data.log.is_cut ? ' (the last 256 KiB)' : ''}`}
          side={<Choice label="Lines of the log" value={level} options={[['warnings', 'Warnings'], ['all', 'All lines']]} onChange={(value) => change({ level: value })} />}>
          {shown.length
            ? (
              <table class="log">
                <tbody>
                  {shown.slice(-400).reverse().map((line) => (
                    <tr class={line.level}><td class="n">{line.time}</td><td>{line.level.toLowerCase()}</td><td class="text">{line.text}<span class="dim"> {line.where}</span></td></tr>
                  ))}
                </tbody>
              </table>
            )
            : <Empty>{level === 'all' ? 'The log is empty.' : 'No warnings.'}</Empty>}
        </Panel>
      )}
    </div>
  )
}

function memoryOption(curves: Curves): Option | null {
  const lines = MEMORY.filter(([name]) => curves.values[name]?.some((each) => each !== null))
  if (!lines.length) return null
  const most = lines.flatMap(([name]) => curves.values[name]).reduce((before: number, each) => Math.max(before, each ?? 0), 0)
  const option = axes({ min: 0, max: curves.step[curves.step.length - 1] }, { min: 0, max: most }, 'count', 'plain')
  option.series = lines.map(([name], n) => ({
    type: 'line', showSymbol: curves.step.length < 3, color: color(n ? '--c1' : '--c0'), lineStyle: { width: 2 }, emphasis: { disabled: true },
    data: curves.step.map((step, row) => [step, curves.values[name][row]]).filter((each) => each[1] !== null),
  }))
  option.tooltip.formatter = (given: Option[]) => tip(`step ${given[0].data[0]}`, given.map((each) => (
    { color: each.color, label: lines[each.seriesIndex][1], value: number(each.data[1], 'gib') })))
  return option
}
