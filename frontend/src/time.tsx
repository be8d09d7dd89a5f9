// Where the seconds of each step went, and who waited for whom in one of them.
import { useMemo } from 'preact/hooks'
import { ofStep, query, stepsOf, useData, type Curves, type Run } from './api'
import { along, axes, Chart, color, stepAxis, tip, useTheme, type Option } from './chart'
import { duration, number } from './format'
import { Choice, Empty, Legend, nearest, Panel, Problem, Problems, RunChoice, StepChoice, useKeys } from './parts'
import { change, current } from './route'

const COLORS = ['--c0', '--c1', '--c2', '--c3', '--c4', '--c5', '--c6', '--c7']
const WORDS: Record<string, string> = {
  old_logprobs: 'old log-probs', rollout: 'sampling', evaluate: 'evaluation', write: 'writing records', wait: 'waiting for groups',
}
// Colours stay with a phase, in all charts; small ones share the last.
const OF = ['rollout', 'evaluate', 'update', 'old_logprobs', 'score', 'write', 'checkpoint']
const ALIKE: Record<string, string> = { reference: 'write', learn: 'update', wait: 'score', publish: 'checkpoint' }
const colorOf = (phase: string) => {
  const at = OF.indexOf(ALIKE[phase] ?? phase)
  return COLORS[at < 0 ? 7 : at]
}
const say = (phase: string) => WORDS[phase] ?? phase.replace(/_/g, ' ')

interface Window {
  step: number
  steps: number[]
  seconds: number
  tracks: { name: string; slices: [string, number, number][] }[]
  left_out: number
}

export function Time({ runs, words }: { runs: Run[]; words: URLSearchParams }) {
  const theme = useTheme()
  const run = words.get('run') ?? ''
  const asShare = words.get('as') === 'share'
  const { data, error } = useData<Record<string, Curves>>(query('series', { runs: [run], names: ['time/*_s', 'overlap/*'] }), [run])
  const curves = data?.[run]
  const phases = useMemo(() => curves && phasesOf(curves), [curves])
  const option = useMemo(() => curves && phases && phaseOption(curves, phases, asShare), [curves, phases, asShare, theme])
  const all = phases?.reduce((total, each) => total + each.seconds, 0) ?? 0
  const steps = curves?.steps ?? 0
  const every = curves?.every ?? 1
  return (
    <div class="page">
      <div class="bar">
        <RunChoice runs={runs} run={run} />
        <Choice label="Time of a step" value={asShare ? 'share' : 'seconds'} options={[['seconds', 'Seconds'], ['share', 'Shares']]} onChange={(value) => change({ as: value })} />
      </div>
      {error && <Problem>{error}</Problem>}
      {curves && <Problems lines={curves.problems} />}
      {curves && !steps && <Empty>No step is done yet.</Empty>}
      {option && phases && steps > 0 && (
        <div class="wide-narrow">
          <Panel title="Time of each step" figures={['time/step_s']} unit={`${duration(all)} in ${steps} steps${every > 1 ? `; a bar is the mean of ${every}` : ''}`}>
            <Chart option={option} height={Math.max(230, 27 * phases.length + 40)} label="Seconds by phase and step" onClick={(event) => change({ step: Number(event.name) })} />
            <Legend items={phases.filter((each) => each.seconds > 0.002 * all).map((each) => ({ color: `var(${colorOf(each.name)})`, label: say(each.name) }))} />
          </Panel>
          <Panel title="In all">
            <table>
              <thead><tr><th>Phase</th><th class="n">Time</th><th class="n">Share</th><th class="n">A step</th></tr></thead>
              <tbody>
                {phases.map((each) => (
                  <tr><td><i class="dot" style={{ background: `var(${colorOf(each.name)})` }} />{say(each.name)}</td><td class="n">{duration(each.seconds)}</td><td class="n">{number(each.seconds / all, 'share')}</td><td class="n">{duration(each.seconds / steps)}</td></tr>
                ))}
                {Object.entries(curves!.totals).filter(([name]) => name.startsWith('overlap/')).map(([name, seconds]) => (
                  <tr><td class="dim">{name === 'overlap/sampling_s' ? 'engines wrote beside it' : 'engines waited'}</td><td class="n">{duration(seconds ?? 0)}</td><td /><td class="n">{duration((seconds ?? 0) / steps)}</td></tr>
                ))}
              </tbody>
            </table>
          </Panel>
        </div>
      )}
      <Timeline run={run} step={words.get('step')} />
    </div>
  )
}

function phasesOf(curves: Curves): { name: string; values: (number | null)[]; seconds: number }[] {
  return Object.entries(curves.totals)
    .filter(([name]) => name.startsWith('time/') && name !== 'time/step_s')
    .map(([name, seconds]) => ({ name: name.slice(5, -2), values: ofStep(curves, name), seconds: seconds ?? 0 }))
    .filter((each) => each.seconds > 0)
    .sort((a, b) => b.seconds - a.seconds)
}

function phaseOption(curves: Curves, phases: ReturnType<typeof phasesOf>, asShare: boolean): Option {
  const all = curves.step.map((_, row) => phases.reduce((sum, each) => sum + (each.values[row] ?? 0), 0) || 1)
  const option = axes(stepAxis(curves.step, curves.every), { min: 0, max: asShare ? 1 : all.reduce((most, each) => Math.max(most, each), 0) }, 'count', asShare ? 'share' : 'seconds')
  option.tooltip.axisPointer = { type: 'shadow', shadowStyle: { color: color('--dim', 0.12) } }
  option.series = phases.map((each) => ({
    type: 'bar', stack: 'all', barCategoryGap: curves.step.length > 60 ? '0%' : '18%', color: color(colorOf(each.name)), emphasis: { disabled: true },
    data: each.values.map((value, row) => (asShare ? (value ?? 0) / all[row] : (value ?? 0))),
  }))
  option.tooltip.formatter = (given: Option[]) => {
    const row = given[0].dataIndex as number
    return tip(`${stepsOf(curves, row)}: ${duration(all[row])}`, phases.filter((each) => each.values[row]).map((each) => (
      { color: color(colorOf(each.name)), label: say(each.name), value: `${duration(each.values[row]!)}  (${number(each.values[row]! / all[row], 'share')})` })))
  }
  return option
}

const ORDER = ['trainer', 'learner', 'sampler', 'scorers', 'checkpoint']
const rank = (name: string) => (ORDER.includes(name) ? ORDER.indexOf(name) : 2.5)

/** An engine writes answers, the trainer records: one word in the file. */
function ofEngine(track: Window['tracks'][number]): Window['tracks'][number] {
  if (!track.name.startsWith('engine')) return track
  return { ...track, slices: track.slices.map(([name, start, length]) => [name === 'write' ? 'rollout' : name, start, length]) }
}

function Timeline({ run, step }: { run: string; step: string | null }) {
  const theme = useTheme()
  const { data, error } = useData<Window>(query('run/timeline', { run, step }), [run])
  const tracks = useMemo(() => (data?.tracks ?? []).map(ofEngine).sort((a, b) => rank(a.name) - rank(b.name) || a.name.localeCompare(b.name, 'en', { numeric: true })), [data])
  const names = useMemo(() => {
    const seconds = new Map<string, number>()
    for (const track of tracks) for (const [name, , length] of track.slices) seconds.set(name, (seconds.get(name) ?? 0) + length)
    return [...seconds].sort((a, b) => b[1] - a[1]).map(([name]) => name)
  }, [tracks])
  const option = useMemo(() => data && timelineOption(data, tracks, names), [data, tracks, names, theme])
  const go = (by: number) => {
    const asked = current('step')
    const next = data?.steps[(asked === null ? data.steps.length - 1 : nearest(data.steps, Number(asked))) + by]
    if (next !== undefined) change({ step: next })
  }
  useKeys({ ']': () => go(1), '[': () => go(-1) })
  return (
    <Panel title="Who waited for whom" about={['What each part of the run did in a step; a gap is time in which it waited.', 'the part that costs most, engines or learner, has few gaps']} unit={data ? `${duration(data.seconds)}; a gap is time in which a part waited` : ''}
      side={data && <StepChoice steps={data.steps} step={data.step} onChange={(next) => change({ step: next })} />}>
      {error && <Problem>{error}</Problem>}
      {option && tracks.length > 0
        ? <><Chart option={option} height={46 + 34 * tracks.length} label="Timeline of the step" onZoom={(from, to) => ({ xAxis: along(from, to, 'seconds') })} /><Legend items={names.slice(0, 12).map((name) => ({ color: `var(${colorOf(name)})`, label: say(name) }))} /></>
        : data && <Empty>The timeline holds nothing of step {step ?? data.step}.</Empty>}
      {data && data.left_out > 0 && <p class="dim note">{data.left_out} of the shortest slices are not drawn.</p>}
    </Panel>
  )
}

function timelineOption(data: Window, tracks: Window['tracks'], names: string[]): Option {
  const option = axes({ min: 0, max: data.seconds }, { type: 'category', inverse: true, data: tracks.map((each) => each.name), splitLine: { show: false }, axisLabel: { color: color('--ink'), fontSize: 12 } }, 'seconds', 'plain')
  const slices = tracks.flatMap((track, row) => track.slices.map(([name, start, length]) => [row, start, start + length, names.indexOf(name)]))
  option.tooltip = { ...option.tooltip, trigger: 'item', formatter: (cell: Option) => {
    const [row, start, end, name] = cell.data
    return tip(`${tracks[row].name}: ${say(names[name])}`, [{ label: 'lasts', value: duration(end - start) }, { label: 'from', value: `${start.toFixed(2)} s` }, { label: 'to', value: `${end.toFixed(2)} s` }])
  } }
  option.dataZoom = [{ type: 'inside', filterMode: 'weakFilter', zoomOnMouseWheel: 'ctrl', moveOnMouseWheel: false }]
  option.series = [{
    type: 'custom', data: slices, encode: { x: [1, 2], y: 0 }, clip: true,
    renderItem: (_: unknown, api: Option) => {
      const start = api.coord([api.value(1), api.value(0)])
      const end = api.coord([api.value(2), api.value(0)])
      const width = Math.max(end[0] - start[0], 1)
      return { type: 'rect', shape: { x: start[0], y: start[1] - 10, width, height: 20, r: width > 6 ? 2 : 0 }, style: { fill: color(colorOf(names[api.value(3)])) } }
    },
  }]
  return option
}
