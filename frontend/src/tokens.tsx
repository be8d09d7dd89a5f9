// The text of an answer, its tokens coloured by one of their numbers.
import { useMemo, useState } from 'preact/hooks'
import type { Answer, Values } from './api'
import { useTheme } from './chart'
import { Choice, Panel } from './parts'
import { change } from './route'

export const COLORINGS = ['logprobs', 'entropies', 'difference', 'advantage', 'versions', 'none'] as const
export type Coloring = (typeof COLORINGS)[number]

const NAMES: Record<Coloring, string> = {
  logprobs: 'Log-prob',
  entropies: 'Entropy',
  difference: 'Sampler − trainer',
  advantage: 'Advantage',
  versions: 'Version',
  none: 'None',
}
const SCALES: Record<Coloring, [from: string, to: string, says: string]> = {
  logprobs: ['0', '−5 nats', 'log-prob of the sampler'],
  entropies: ['0', '3 nats', 'entropy of the trainer’s distribution'],
  difference: ['0', '0.5 nats', 'absolute difference of the two log-probs'],
  advantage: ['−2', '+2', 'advantage'],
  versions: ['', '', 'weight version that wrote it'],
  none: ['', '', ''],
}
const NEEDS: Partial<Record<Coloring, string>> = {
  logprobs: 'log-probs', versions: 'versions of tokens',
}
const PAGE = 4000

function valuesOf(answer: Answer, coloring: Coloring): Values | null {
  const { logprobs, trainer_logprobs: trainer, token_advantages: own } = answer.columns
  if (coloring === 'none') return null
  if (coloring === 'difference') {
    return logprobs && trainer ? logprobs.map((each, n) => (each === null || trainer[n] == null ? null : each - trainer[n]!)) : null
  }
  if (coloring === 'advantage') {
    if (own) return own
    return answer.advantage === null ? null : new Array(answer.response_tokens).fill(answer.advantage)
  }
  return answer.columns[coloring] ?? null
}

function paint(coloring: Coloring, value: number | null, oldest: number): string {
  if (value === null) return ''
  const share = (x: number) => Math.min(Math.max(x, 0), 1)
  const mix = (name: string, x: number) => (x < 0.02 ? '' : `color-mix(in srgb, var(${name}) ${(75 * share(x)).toFixed(0)}%, transparent)`)
  if (coloring === 'logprobs') return mix('--heat-red', -value / 5)
  if (coloring === 'entropies') return mix('--heat-violet', value / 3)
  if (coloring === 'difference') return mix('--heat-orange', Math.abs(value) / 0.5)
  if (coloring === 'advantage') return mix(value > 0 ? '--heat-green' : '--heat-red', Math.abs(value) / 2)
  return value < 0 ? '' : `color-mix(in srgb, var(--c${(value - oldest) % 8}) 30%, transparent)`
}

export function Tokens(props: {
  answer: Answer
  meanings: Record<string, string>
  without: string | null
  coloring: Coloring
  search: string
}) {
  const { answer, coloring } = props
  useTheme()
  const [at, point] = useState<number | null>(null)
  const [most, show] = useState(PAGE)
  const values = valuesOf(answer, coloring)
  const tokens = answer.tokens
  const options = COLORINGS.map((each): [Coloring, string] => [each, NAMES[each]])
  const body = useMemo(() => {
    if (!tokens) return null
    const special = new Set(tokens.special)
    const oldest = answer.oldest_version ?? 0
    return tokens.texts.slice(0, most).map((text, n) => (
      <span data-n={n} class={special.has(n) ? 'special' : undefined} style={{ background: values ? paint(coloring, values[n] ?? null, oldest) : '' }}>
        {special.has(n) ? text : visible(text)}
      </span>
    ))
  }, [answer, coloring, most])
  return (
    <Panel
      title={`Answer ${answer.answer + 1}`}
      unit={`${answer.response_tokens.toLocaleString('en-US')} tokens`}
      side={tokens && <Choice label="Colour of tokens" value={coloring} options={options} onChange={(value) => change({ color: value })} />}
    >
      {answer.scorer_error && <p class="problem">Scoring failed: {answer.scorer_error}</p>}
      {tokens && coloring !== 'none' && (values
        ? <p class="scale"><Scale coloring={coloring} values={values} answer={answer} /><Readout answer={answer} at={at} /></p>
        : <p class="scale absent">{absent(coloring)}</p>)}
      {answer.response === null && !tokens && (
        <p class="empty">The text of this answer was not kept: its step has more tokens than observe.rollout_text_tokens.</p>
      )}
      {tokens
        ? (
          <pre
            class="text tokens"
            onMouseOver={(event) => {
              const n = (event.target as HTMLElement).dataset.n
              point(n === undefined ? null : Number(n))
            }}
            onMouseLeave={() => point(null)}
          >
            {body}
          </pre>
        )
        : answer.response !== null && (
          <>
            <p class="scale absent">{props.without ?? 'The tokens of this answer were not kept.'}</p>
            <pre class="text">{answer.response}</pre>
          </>
        )}
      {tokens && tokens.texts.length > most && (
        <button type="button" class="wide" onClick={() => show(tokens.texts.length)}>
          Show the other {(tokens.texts.length - most).toLocaleString('en-US')} tokens
        </button>
      )}
    </Panel>
  )
}

function absent(coloring: Coloring): string {
  if (coloring === 'advantage') return 'This answer has no advantage: its group was not trained on.'
  if (coloring === 'difference' || coloring === 'entropies') {
    const what = coloring === 'difference' ? 'The trainer’s log-probs' : 'Entropies of tokens'
    return `${what} are kept of answers that were trained on, in steps that took a pass for them.`
  }
  return `This run does not keep ${NEEDS[coloring]}, so tokens cannot be coloured by them.`
}

/** Marks for what would not be seen: line ends and control characters. */
export function visible(text: string): string {
  return text
    .replace(/\n/g, '↵\n')
    .replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(/\u007f/g, '\u2421')
    .replace(/[\u200b-\u200f\u202a-\u202e\u2066-\u2069]/g, (c) => `⟨U+${c.charCodeAt(0).toString(16).toUpperCase()}⟩`)
}

function Scale({ coloring, values, answer }: { coloring: Coloring; values: Values; answer: Answer }) {
  const [from, to, says] = SCALES[coloring]
  if (coloring === 'versions') {
    const found = [...new Set(values)].filter((each): each is number => each !== null && each >= 0)
    const oldest = answer.oldest_version ?? 0
    return <span>{found.map((each) => <span class="swatch" style={{ background: paint(coloring, each, oldest) }}>{each}</span>)} {says}</span>
  }
  const isShared = coloring === 'advantage' && !answer.columns.token_advantages
  return (
    <span>
      {from} <i class={`ramp ${coloring}`} /> {to} <span class="dim">{says}{isShared && ', the same for each token of the answer'}</span>
    </span>
  )
}

function Readout({ answer, at }: { answer: Answer; at: number | null }) {
  if (at === null || !answer.tokens) return <span class="readout dim">Point at a token to see its numbers</span>
  const { logprobs, trainer_logprobs, entropies, versions } = answer.columns
  const nats = (values: Values | undefined) => values?.[at]?.toFixed(3).replace('-', '−')
  const said = [
    ['log-prob', nats(logprobs)],
    ['p', logprobs?.[at] == null ? undefined : Math.exp(logprobs[at]!).toPrecision(3)],
    ['trainer', nats(trainer_logprobs)],
    ['entropy', nats(entropies)],
    ['version', versions?.[at] ?? undefined],
  ].filter(([, value]) => value !== undefined)
  return (
    <span class="readout">
      <b>{at + 1}</b> <code>{JSON.stringify(answer.tokens.texts[at])}</code>
      {said.map(([name, value]) => <span> {name} <b>{value}</b></span>)}
    </span>
  )
}
