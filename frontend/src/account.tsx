// Where the tokens of a run went, how hard its prompts are, and how long its answers.
import { useEffect, useMemo, useState } from 'preact/hooks'
import { ofStep, query, stepsOf, useData, type Curves, type Run } from './api'
import { axes, Chart, color, stepAxis, tip, useTheme, type Option } from './chart'
import { number, OUTCOMES } from './format'
import { Choice, Empty, Legend, nearest, Panel, Problem, Problems, RunChoice, StepChoice } from './parts'
import { change } from './route'

const FATES = ['trained', 'all_right', 'all_wrong', 'surplus', 'stale', 'failed']
const FATE_COLORS = ['--c0', '--c2', '--c3', '--c1', '--c5', '--c4']

interface Spread {
  steps: number[]
  every: number
  rates: number[][]
  rate_names: string[]
  lengths: number[][]
  length_edges: number[]
  read: number
  of: number
  is_done: boolean
  problems: string[]
}

export function Account({ runs, words }: { runs: Run[]; words: URLSearchParams }) {
  const theme = useTheme()
  const run = words.get('run') ?? ''
  const asShare = words.get('as') === 'share'
  const curves = useData<Record<string, Curves>>(query('series', { runs: [run], names: ['sampling/tokens/*'] }), [run])
  const spread = useData<Spread>(query('run/spread', { run }), [run])
  useEffect(() => {
    if (!spread.data || spread.data.is_done) return
    const timer = setTimeout(spread.again, 500)
    return () => clearTimeout(timer)
  }, [spread.data])
  const found = curves.data?.[run]
  const account = useMemo(() => found && accountOption(found, asShare), [found, asShare, theme])
  const totals = useMemo(() => found && FATES.map((fate) => found.totals[`sampling/tokens/${fate}`] ?? 0), [found])
  const there = spread.data && !spread.stale ? spread.data : null
  const rates = useMemo(() => there && ratesOption(there), [there, theme])
  const lengths = useMemo(() => there && lengthsOption(there), [there, theme])
  const all = totals?.reduce((a, b) => a + b, 0) ?? 0
  return (
    <div class="page">
      <div class="bar">
        <RunChoice runs={runs} run={run} />
        <Choice label="Token account" value={asShare ? 'share' : 'tokens'} options={[['tokens', 'Tokens'], ['share', 'Shares']]} onChange={(value) => change({ as: value })} />
      </div>
      {curves.error && <Problem>{curves.error}</Problem>}
      {found && <Problems lines={found.problems} />}
      <Panel title="Tokens generated, by use" figures={['sampling/tokens/trained', 'sampling/tokens/in_progress']} unit={all ? `${number(all, 'tokens')} tokens in closed groups${found!.every > 1 ? `; a bar is the mean of ${found!.every} steps` : ''}` : ''}>
        {account && all > 0
          ? <><Chart option={account} height={210} label="Tokens by use and step" /><Legend items={FATES.map((fate, n) => ({ color: `var(${FATE_COLORS[n]})`, label: `${OUTCOMES[fate][0]} ${number(totals![n] / all, 'share')}` })).filter((_, n) => totals![n] > 0)} /></>
          : <Empty>No step is done yet.</Empty>}
      </Panel>
      {spread.error && <Problem>{spread.error}</Problem>}
      {there && <Problems lines={there.problems} />}
      {there && !there.is_done && <p class="dim note">Reading answers: {there.read} of {there.of} steps so far, the newest first.</p>}
      {there && there.steps.length > 0
        ? (
          <div class="two">
            <Panel title="Prompts by pass rate" about={['Prompts of a step by the share of their answers that are right.', 'many lie between 0 and 1: only these teach a policy that is compared with its own answers']} unit="share of a step’s groups">
              {rates && <Chart option={rates} height={210} label="Prompts by pass rate and step" />}
              <Legend items={there.rate_names.map((name, n) => ({ color: rateColor(n), label: n === 0 ? 'none right' : n === there.rate_names.length - 1 ? 'all right' : name }))} />
            </Panel>
            <Panel title="Length of answers" figures={['length/response/mean', 'length/truncated']} unit="tokens; stronger: more answers of the step">
              {lengths && <Chart option={lengths} height={210} label="Lengths of answers by step" />}
            </Panel>
            <LengthsOfStep spread={there} words={words} />
          </div>
        )
        : there && <Empty>No answers yet: pass rates and lengths come with the first step.</Empty>}
    </div>
  )
}

const sum = (values: (number | null)[]) => values.reduce((a: number, b) => a + (b ?? 0), 0)
const rateColor = (n: number) => `var(--rate${n})`

function accountOption(curves: Curves, asShare: boolean): Option {
  const used = new Map(FATES.map((fate) => [fate, ofStep(curves, `sampling/tokens/${fate}`)]))
  const rows = curves.step.map((_, row) => row).filter((row) => used.get('trained')![row] != null)
  const at = (fate: string, row: number) => used.get(fate)![row] ?? 0
  const all = (row: number) => FATES.reduce((total, fate) => total + at(fate, row), 0)
  const option = axes(stepAxis(rows.map((row) => curves.step[row]), curves.every), { min: 0, max: asShare ? 1 : rows.reduce((most, row) => Math.max(most, all(row)), 0) }, 'count', asShare ? 'share' : 'tokens')
  option.tooltip.axisPointer = { type: 'shadow', shadowStyle: { color: color('--dim', 0.12) } }
  option.series = FATES.map((fate, n) => ({
    type: 'bar', stack: 'all', barCategoryGap: rows.length > 60 ? '0%' : '18%', color: color(FATE_COLORS[n]), emphasis: { disabled: true },
    data: rows.map((row) => (asShare ? at(fate, row) / Math.max(all(row), 1) : at(fate, row))),
  }))
  option.tooltip.formatter = (given: Option[]) => {
    const row = rows[given[0].dataIndex]
    return tip(`${stepsOf(curves, row)}: ${number(all(row), 'tokens')} tokens`,
      FATES.map((fate, n) => ({ color: color(FATE_COLORS[n]), label: OUTCOMES[fate][0], value: `${number(at(fate, row), 'tokens')}  (${number(at(fate, row) / Math.max(all(row), 1), 'share')})` })))
  }
  return option
}

function span(spread: Spread, at: number): string {
  return spread.every > 1 ? `steps ${spread.steps[at]} to ${spread.steps[at] + spread.every - 1}` : `step ${spread.steps[at]}`
}

function ratesOption(spread: Spread): Option {
  const totals = spread.rates.map((each) => Math.max(sum(each), 1))
  const option = axes(stepAxis(spread.steps, spread.every), { min: 0, max: 1 }, 'count', 'share')
  option.tooltip.axisPointer = { type: 'shadow', shadowStyle: { color: color('--dim', 0.12) } }
  option.series = spread.rate_names.map((_, n) => ({
    type: 'bar', stack: 'all', barCategoryGap: '0%', color: color(`--rate${n}`), emphasis: { disabled: true },
    data: spread.rates.map((each, at) => each[n] / totals[at]),
  }))
  option.tooltip.formatter = (given: Option[]) => {
    const at = given[0].dataIndex as number
    return tip(`${span(spread, at)}: ${totals[at]} groups`, spread.rate_names.map((name, n) => (
      { color: color(`--rate${n}`), label: n === 0 ? 'none right' : n === spread.rate_names.length - 1 ? 'all right' : name, value: `${spread.rates[at][n]}  (${number(spread.rates[at][n] / totals[at], 'share')})` }
    )).reverse())
  }
  return option
}

function lengthsOption(spread: Spread): Option {
  const last = spread.length_edges[spread.length_edges.length - 1]
  const option = axes(stepAxis(spread.steps, spread.every), { min: 0, max: last, splitLine: { show: false } }, 'count', 'tokens')
  option.yAxis.max = last
  option.yAxis.axisLabel.showMaxLabel = false
  const cells: number[][] = []
  spread.lengths.forEach((counts, at) => {
    const total = Math.max(sum(counts), 1)
    counts.forEach((count, bin) => count && cells.push([at, bin, count, count / total]))
  })
  const dark = color('--accent')
  option.tooltip = { ...option.tooltip, trigger: 'item', formatter: (cell: Option) => {
    const [at, bin, count, share] = cell.data
    return tip(span(spread, at), [
      { label: 'tokens', value: `${spread.length_edges[bin]} to ${spread.length_edges[bin + 1] - 1}` },
      { label: 'answers', value: `${count}  (${number(share, 'share')})` },
    ])
  } }
  option.series = [{
    type: 'custom', data: cells, encode: { x: 0, y: 1 },
    renderItem: (_: unknown, api: Option) => {
      const [at, bin] = [api.value(0), api.value(1)]
      const low = api.coord([at, spread.length_edges[bin]])
      const high = api.coord([at, spread.length_edges[bin + 1]])
      const width = api.size([1, 0])[0]
      const opacity = 0.08 + 0.92 * Math.min(api.value(3) / 0.25, 1)
      return { type: 'rect', shape: { x: low[0] - width / 2, y: high[1], width: width + 0.5, height: low[1] - high[1] + 0.5 }, style: { fill: dark, opacity } }
    },
  }]
  return option
}

function LengthsOfStep({ spread, words }: { spread: Spread; words: URLSearchParams }) {
  const theme = useTheme()
  const asked = words.get('step')
  const at = asked === null ? spread.steps.length - 1 : nearest(spread.steps, Number(asked))
  const [first] = useState(0)
  const option = useMemo(() => {
    const edges = spread.length_edges
    const share = (row: number) => { const all = Math.max(sum(spread.lengths[row]), 1); return spread.lengths[row].map((each) => each / all) }
    const made = axes({ type: 'category', data: edges.slice(0, -1) }, { min: 0, max: Math.max(...share(at), ...share(first)) }, 'count', 'share')
    made.tooltip.axisPointer = { type: 'shadow', shadowStyle: { color: color('--dim', 0.12) } }
    made.series = [
      { type: 'bar', data: share(at), color: color('--accent'), barGap: '-100%', barCategoryGap: '10%', emphasis: { disabled: true } },
      { type: 'line', step: 'middle', data: share(first), color: color('--dim'), showSymbol: false, lineStyle: { width: 1.5 }, emphasis: { disabled: true } },
    ]
    made.tooltip.formatter = (given: Option[]) => {
      const bin = given[0].dataIndex as number
      return tip(`${edges[bin]} to ${edges[bin + 1] - 1} tokens`, [at, first].map((row, n) => (
        { color: color(n ? '--dim' : '--accent'), label: span(spread, row), value: `${spread.lengths[row][bin]}  (${number(share(row)[bin], 'share')})` })))
    }
    return made
  }, [spread, at, theme])
  return (
    <Panel title="Lengths of one step" figures={['length/response/mean', 'length/truncated']} unit="share of its answers, by tokens" class="across"
      side={<StepChoice steps={spread.steps} step={spread.steps[at]} onChange={(step) => change({ step })} />}>
      <Chart option={option} height={170} label="Histogram of lengths" />
      <Legend items={[{ color: 'var(--accent)', label: span(spread, at) }, { color: 'var(--dim)', label: `${span(spread, first)}, for comparison` }]} />
    </Panel>
  )
}
