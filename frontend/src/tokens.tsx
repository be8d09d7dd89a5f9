// The text of an answer, its tokens coloured by one of their numbers.
import type { ComponentChildren } from 'preact'
import { useMemo, useState } from 'preact/hooks'
import type { Answer, Turn, Values } from './api'
import { useTheme } from './chart'
import { fixed } from './format'
import { Choice, Images, Panel } from './parts'
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
  run: string
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
  const turns = answer.turns ?? []
  const own = turns.filter(({ author }) => author === 'model').length
  const body = useMemo(() => {
    if (!tokens) return []
    const special = new Set(tokens.special)
    const oldest = answer.oldest_version ?? 0
    const called = callTokens(answer)
    // Of an image's tokens, which an environment showed, the first stands for all.
    const repeats = (n: number) => special.has(n) && special.has(n - 1) && tokens.texts[n] === tokens.texts[n - 1] && answer.columns.versions?.[n] === -1
    return tokens.texts.slice(0, most).map((text, n) => {
      if (repeats(n)) return null
      const value = answer.columns.versions?.[n] === -1 ? null : (values?.[n] ?? null)
      return (
        <span data-n={n} class={special.has(n) ? 'special' : called.has(n) ? 'call' : undefined} style={{ background: paint(coloring, value, oldest) }}>
          {special.has(n) ? text : visible(text)}
        </span>
      )
    })
  }, [answer, coloring, most])
  return (
    <Panel
      title={`Answer ${answer.answer + 1}`}
      unit={`${answer.response_tokens.toLocaleString('en-US')} tokens${own ? ` in ${own} ${own === 1 ? 'turn' : 'turns'}` : ''}`}
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
          <div
            class="tokens"
            onMouseOver={(event) => {
              const n = (event.target as HTMLElement).dataset.n
              point(n === undefined ? null : Number(n))
            }}
            onMouseLeave={() => point(null)}
          >
            {turns.length ? <Turns run={props.run} turns={turns} body={body} /> : <pre class="text">{body}</pre>}
          </div>
        )
        : answer.response !== null && (
          <>
            <p class="scale absent">{props.without ?? 'The tokens of this answer were not kept.'}</p>
            {turns.length ? <Turns run={props.run} turns={turns} /> : <pre class="text">{answer.response}</pre>}
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

/** A conversation: a block a turn, of its tokens, or of its text where there are none. */
function Turns({ run, turns, body }: { run: string; turns: Turn[]; body?: ComponentChildren[] }) {
  let start = 0
  return (
    <ol class="turns">
      {turns.map(({ author, tokens, reward, calls, malformed, pieces, images }) => {
        const part = body?.slice(start, (start += tokens))
        if (body && tokens && !part!.length) return null // behind the tokens that are shown
        return (
          <li class={author}>
            <header>
              <b>{author}</b> <span class="dim">{tokens.toLocaleString('en-US')} tokens</span>
              {!!calls && <span class="called">{calls} {calls === 1 ? 'call' : 'calls'}</span>}
              {!!malformed && <span class="bad">{malformed} malformed</span>}
              {author === 'model' && <span class="dim worth">reward {fixed(reward)}</span>}
            </header>
            <Images run={run} paths={images ?? []} />
            <pre class="text">{part ?? pieces.map(([text, isCall]) => <span class={isCall ? 'call' : undefined}>{visible(text)}</span>)}</pre>
          </li>
        )
      })}
    </ol>
  )
}

/** The places of an answer's tokens that are part of a call. */
function callTokens({ tokens, turns }: Answer): Set<number> {
  const found = new Set<number>()
  const special = new Set(tokens!.special)
  let start = 0
  for (const turn of turns ?? []) {
    const texts = tokens!.texts.slice(start, start + turn.tokens).map((text, n) => (special.has(start + n) ? '' : text))
    const whole = texts.join('')
    let from = 0
    for (const [text] of turn.pieces.filter(([, isCall]) => isCall)) {
      from = whole.indexOf(text, from)
      if (from < 0) break
      let at = 0
      texts.forEach((each, n) => {
        if (at < from + text.length && at + each.length > from) found.add(start + n)
        at += each.length
      })
      from += text.length
    }
    start += turn.tokens
  }
  return found
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
  const said = versions?.[at] === -1 ? [['not written by the model', '']] : [
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
