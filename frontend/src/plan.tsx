// The run's recipe on other GPUs: `winnow plan`, which the server runs, told as it goes on.
import type { ComponentChildren } from 'preact'
import { useEffect, useRef, useState } from 'preact/hooks'
import { query, stream, useData, type Run } from './api'
import { duration, number } from './format'
import { Choice, Empty, Legend, Panel, Problem, RunChoice } from './parts'

type Numbers = Record<string, number>
interface Totals { mean_response: number; tokens: number; step_seconds?: number; mfu?: number; hours?: number; gpu_hours?: number; cost?: number }
interface Change extends Totals { set: string[]; peak_gib: number; host_gib: number; rows: number; expected: Totals }
interface Plan {
  machine: { gpu: string; nodes: number; gpus_each: number }
  overrides: string[]
  parameters: Numbers
  faults: string[]
  change?: Change | null
  memory: { peak_gib: number; peak_within: string; limit_gib: number; host_gib: number; roles_gib: Numbers; tensors_gib: Numbers }
  learning: { lockstep: number; micro_batches: number; petaflop: number; sent_gib: Numbers; seconds: Numbers }
  engine: { engines: number; gpus_each: number; weights_gib: number; cache_gib: number; room_gib: number; longest_row_gib: number; fits: boolean; rows: number; rollout_seconds?: number }
  apart?: Record<string, { ranks: number; peak_gib: number; beside_policy: boolean; seconds: number }>
  transfers: { publication_gib: number; publication_seconds: number; checkpoint_gib: number; checkpoint_seconds: number }
  run: Totals
  expected: { learning: { seconds: Numbers }; engine: { rollout_seconds?: number }; apart: Record<string, { seconds: number }>; run: Totals }
}
type Row = [name: string, least: string, expected?: string]
type Line = { told?: string; plan?: Plan; error?: string }

const COLORS = ['--c0', '--c1', '--c2', '--c3', '--c4', '--c5', '--c6', '--c7']
const LABELS = { nodes: 'Nodes', gpus: 'GPUs a node', gpu: 'Kind of GPU', mean: 'Mean response, tokens', price: 'Price per GPU-hour' }

export function PlanPage({ runs, words }: { runs: Run[]; words: URLSearchParams }) {
  const run = words.get('run') ?? ''
  const gpus = useData<string[]>('/api/gpus', [])
  const [lengths, choose] = useState<'drawn' | 'run'>('drawn')
  const [told, tell] = useState<string[]>([])
  const [error, fail] = useState<string | null>(null)
  const [plan, show] = useState<Plan | null>(null)
  const [stop, running] = useState<AbortController | null>(null)
  const current = useRef<AbortController | null>(null)
  useEffect(() => () => current.current?.abort(), [])

  const start = async (event: SubmitEvent) => {
    event.preventDefault()
    const given = new FormData(event.currentTarget as HTMLFormElement)
    const value = (name: string) => (given.get(name) ? Number(given.get(name)) : null)
    const form = { nodes: value('nodes'), gpus: value('gpus'), gpu: given.get('gpu'), lengths, mean_response: value('mean'), price: value('price') }
    const control = (current.current = new AbortController())
    running(control)
    tell([])
    fail(null)
    show(null)
    try {
      await stream<Line>(query('run/plan', { run }), form, control.signal, (line) => {
        if (line.told) tell((lines) => [...lines, line.told!])
        if (line.plan) show(line.plan)
        if (line.error) fail(line.error)
      })
    } catch (problem) {
      if ((problem as Error).name !== 'AbortError') fail((problem as Error).message)
    }
    running(null)
  }
  return (
    <div class="page plan">
      <div class="bar"><RunChoice runs={runs} run={run} /></div>
      <Panel title="The run's recipe on other GPUs" unit="nothing of a GPU is needed here; the run is not changed">
        <form class="bar" onSubmit={start}>
          <Field label={LABELS.nodes}><input name="nodes" type="number" min={1} max={1000} defaultValue={1} required /></Field>
          <Field label={LABELS.gpus}><input name="gpus" type="number" min={1} max={72} defaultValue={8} required /></Field>
          <Field label={LABELS.gpu}>
            <select name="gpu">{gpus.data?.map((name) => <option selected={name === 'h100'}>{name}</option>)}</select>
          </Field>
          <Choice label="Lengths of answers" value={lengths} options={[['drawn', 'Drawn lengths'], ['run', "The run's lengths"]]} onChange={choose} />
          {lengths === 'drawn' && <Field label={LABELS.mean}><input name="mean" type="number" min={1} max={1e7} step="any" placeholder="limit / 4" /></Field>}
          <Field label={LABELS.price}><input name="price" type="number" min={0} max={1e6} step="any" placeholder="none" /></Field>
          {stop
            ? <button type="button" onClick={() => stop.abort()}>Cancel</button>
            : <button type="submit" class="main">Plan</button>}
        </form>
        {stop && <p class="dim note" role="status">{told.length ? `${told[told.length - 1]} …` : 'starting …'} A large model takes a minute or two for each.</p>}
        {told.length > 1 && <ul class="told">{told.slice(0, stop ? -1 : undefined).map((line) => <li>{line}</li>)}</ul>}
      </Panel>
      {error && <Problem>{error}</Problem>}
      {gpus.error && <Problem>{gpus.error}</Problem>}
      {plan && <Result plan={plan} />}
    </div>
  )
}

function Field({ label, children }: { label: string; children: ComponentChildren }) {
  return <label class="field">{label}{children}</label>
}

function Result({ plan }: { plan: Plan }) {
  const { memory, learning, engine, transfers, machine, expected } = plan
  const own = plan.overrides.filter((each) => each.startsWith('trainer'))
  const { publication_seconds } = transfers
  const seconds = phases(learning.seconds, engine.rollout_seconds, publication_seconds)
  const likely = phases(expected.learning.seconds, expected.engine.rollout_seconds, publication_seconds)
  return (
    <>
      <Panel title={plan.faults.length ? 'It does not fit' : 'It fits'} unit={`${machine.nodes} × ${machine.gpus_each} ${machine.gpu}`} class={plan.faults.length ? 'unfit' : 'fit'}>
        {plan.faults.map((fault) => <p class="bad note">{fault}</p>)}
        {plan.change && <Fits change={plan.change} />}
        {plan.faults.length > 0 && !plan.change && <p>No change that was tried lets it fit: use more or larger GPUs.</p>}
        <p class="note"><span class="dim">planned with </span><code>{own.join(' ')}</code></p>
      </Panel>
      <div class="two">
        <Panel title="Memory of a rank" unit={`peak_gib ${number(memory.peak_gib, 'gib')} of ${number(memory.limit_gib, 'gib')}, in the ${memory.peak_within}`}>
          <Bars title="roles_gib" values={memory.roles_gib} limit={Math.max(memory.limit_gib, memory.peak_gib)} />
          <Bars title="tensors_gib: the largest at the peak" values={memory.tensors_gib} limit={Math.max(...Object.values(memory.tensors_gib))} />
          {memory.host_gib > 0 && <p class="note">host_gib {number(memory.host_gib, 'gib')}</p>}
        </Panel>
        <Panel title="A step" unit={`${sum(seconds)} at least, ${sum(likely)} expected`}>
          <Stack title="at least" values={seconds} />
          <Stack title="expected" values={likely} />
          {engine.rollout_seconds === undefined && <Empty>Without an engine that fits nothing is written.</Empty>}
          <Facts rows={[
            ['lockstep', learning.lockstep.toFixed(3)],
            ['micro_batches', number(learning.micro_batches, 'count')],
            ['petaflop', number(learning.petaflop)],
            ...Object.entries(learning.sent_gib).map(([kind, size]): Row => [`sent_gib ${kind}`, number(size, 'gib')]),
            ['publication_gib', number(transfers.publication_gib, 'gib')],
            ['checkpoint_gib', number(transfers.checkpoint_gib, 'gib')],
            ['checkpoint_seconds', `${duration(transfers.checkpoint_seconds)}, beside the next step`],
          ]} />
        </Panel>
        <Panel title="Engines" unit={engine.fits ? `${engine.engines} of ${engine.gpus_each} GPU` : 'do not fit'}>
          <Facts rows={[
            ['rows', number(engine.rows, 'count')],
            ...(['weights_gib', 'cache_gib', 'room_gib', 'longest_row_gib'] as const).map((name): Row => [name, number(engine[name], 'gib')]),
          ]} />
        </Panel>
        {plan.apart && (
          <Panel title="Frozen models" unit="on ranks of their own">
            <Facts rows={Object.entries(plan.apart).flatMap(([role, each]): Row[] => [[`${role} ranks`, `${each.ranks}${each.beside_policy ? ', on GPUs of the policy' : ''}`], ['peak_gib', number(each.peak_gib, 'gib')], ['seconds', duration(each.seconds), duration(expected.apart[role]!.seconds)]])} />
          </Panel>
        )}
        <Panel title="The run" unit="at the peaks of the GPUs, and at the efficiencies of winnow plan">
          <Facts rows={totals(plan.run, expected.run)} />
          <Facts rows={Object.entries(plan.parameters).map(([role, count]) => [`parameters ${role}`, number(count, 'count')])} />
        </Panel>
      </div>
    </>
  )
}

function Fits({ change }: { change: Change }) {
  const words = change.set.join(' ')
  const [copied, copy] = useState(false)
  return (
    <div class="fits">
      <p>It fits with</p>
      <pre><code>{words}</code></pre>
      <button type="button" onClick={() => void navigator.clipboard.writeText(words).then(() => copy(true))}>{copied ? 'Copied' : 'Copy'}</button>
      <Facts rows={[['peak_gib', number(change.peak_gib, 'gib')], ...(change.host_gib ? [['host_gib', number(change.host_gib, 'gib')] as Row] : []), ['rows', number(change.rows, 'count')], ...totals(change, change.expected)]} />
    </div>
  )
}

const whole = (value: number) => (value < 100 ? number(value) : Math.round(value).toLocaleString('en-US'))

/** The figures of a run at the peaks of its GPUs, and the expected ones where they differ. */
function totals(run: Totals, expected: Totals): Row[] {
  const texts: [keyof Totals, (value: number) => string][] = [
    ['mean_response', (value) => `${number(value, 'tokens')} tokens`],
    ['tokens', (value) => number(value, 'tokens')],
    ['step_seconds', duration],
    ['mfu', (value) => value.toFixed(3)],
    ['hours', (value) => number(value)],
    ['gpu_hours', whole],
    ['cost', whole],
  ]
  return texts.filter(([name]) => run[name] !== undefined).map(([name, text]): Row => {
    const [least, likely] = [run[name]!, expected[name]!]
    return [name, name === 'mfu' ? `${text(least)} at most` : text(least), likely === least ? undefined : text(likely)]
  })
}

function phases(learning: Numbers, rollout_seconds: number | undefined, publication_seconds: number): Numbers {
  return { ...learning, ...(rollout_seconds === undefined ? {} : { rollout_seconds }), publication_seconds }
}

const sum = (seconds: Numbers) => duration(Object.values(seconds).reduce((a, b) => a + b, 0))

function Facts({ rows }: { rows: Row[] }) {
  const isPaired = rows.some(([, , expected]) => expected !== undefined)
  return (
    <table class="plain">
      {isPaired && <thead><tr><th /><th class="n">at least</th><th class="n">expected</th></tr></thead>}
      <tbody>{rows.map(([name, least, expected]) => <tr><td>{name}</td><td class="n">{least}</td>{isPaired && <td class="n">{expected}</td>}</tr>)}</tbody>
    </table>
  )
}

/** A bar for each value, as long as its share of the limit. */
function Bars({ title, values, limit }: { title: string; values: Numbers; limit: number }) {
  return (
    <div class="bars" role="list" aria-label={title}>
      <p class="caption">{title}</p>
      {Object.entries(values).map(([name, size]) => (
        <div role="listitem">
          <span class="label" title={name}>{name}</span><span class="n">{number(size, 'gib')}</span>
          <svg width="100%" height="6" aria-hidden="true"><rect width="100%" height="6" rx="2" class="track" /><rect width={`${(100 * size) / limit}%`} height="6" rx="2" class="size" /></svg>
        </div>
      ))}
    </div>
  )
}

/** One bar of parts beside each other. */
function Stack({ title, values }: { title: string; values: Numbers }) {
  const parts = Object.entries(values).filter(([, value]) => value > 0)
  const all = parts.reduce((sum, [, value]) => sum + value, 0) || 1
  let at = 0
  return (
    <div class="stack">
      <p class="caption">{title}</p>
      <svg width="100%" height="26" role="img" aria-label={title + ': ' + parts.map(([name, value]) => `${name} ${duration(value)}`).join(', ')}>
        {parts.map(([name, value], n) => {
          const from = at
          at += value
          return <rect x={`${(100 * from) / all}%`} width={`${(100 * value) / all}%`} height="26" style={{ fill: `var(${COLORS[n % COLORS.length]})` }}><title>{name} {duration(value)}</title></rect>
        })}
      </svg>
      <Legend items={parts.map(([name, value], n) => ({ color: `var(${COLORS[n % COLORS.length]})`, label: `${name} ${duration(value)}` }))} />
    </div>
  )
}
