// The answers of another run, or of another step, to the prompt that is read: beside those of the first.
import type { ComponentChildren } from 'preact'
import { useEffect } from 'preact/hooks'
import { query, useData, type Answer, type Run } from './api'
import { fixed, number, OUTCOMES } from './format'
import { Empty, Images, nearest, Problem } from './parts'
import { change } from './route'
import { Tokens, type Coloring } from './tokens'

export interface Followed {
  rows: { step: number; group: number; outcome: string; accuracy: number; reward: number; length: number }[]
  read: number
  steps: number
  is_done: boolean
}
export interface GroupData {
  answers: Answer[]
  meanings: Record<string, string>
  without_tokens: string | null
}

/** One prompt over the steps of a run, asked again until all of them are read. */
export function useFollowed(run: string | null, kind: string, uid: string) {
  const { data, error, again } = useData<Followed>(run === null ? null : query('run/prompt', { run, kind, uid }), run === null ? [] : [run])
  useEffect(() => {
    if (!data || data.is_done) return
    const timer = setTimeout(again, 500)
    return () => clearTimeout(timer)
  }, [data])
  return { data, error }
}

/** Chooses what stands beside the answers: a run, this one included. */
export function BesideChoice({ runs, beside }: { runs: Run[]; beside: string | null }) {
  return (
    <label class="field">
      Beside
      <select value={beside ?? ''} onChange={(event) => change({ beside: event.currentTarget.value || null, beside_step: null, beside_answer: null }, true)}>
        <option value="">nothing</option>
        {runs.map((each) => <option value={each.name}>{each.name}</option>)}
      </select>
    </label>
  )
}

export function Beside(props: {
  run: string
  step: number
  kind: string
  uid: string
  other: string
  words: URLSearchParams
  answer: Answer
  coloring: Coloring
  children: ComponentChildren
}) {
  const { run, step, kind, uid, other, words, answer } = props
  const followed = useFollowed(other, kind, uid)
  const rows = (followed.data?.rows ?? []).filter((row) => other !== run || row.step !== step)
  const wanted = words.get('beside_step') ?? step
  // The nearest one is known when all steps are read.
  const near = followed.data?.is_done ? rows[nearest(rows.map((each) => each.step), Number(wanted))] : undefined
  const row = rows.find((each) => each.step === Number(wanted)) ?? near
  const url = row === undefined ? null : query('run/group', { run: other, kind, step: row.step, group: row.group })
  const { data, error } = useData<GroupData>(url, [])
  const found = url && !error ? data : null
  const answers = found?.answers ?? []
  const place = Math.max(answers.findIndex((each) => keyOf(each) === (words.get('beside_answer') ?? keyOf(answer))), 0)
  const shown = answers[place]
  const worth = (each: Answer) => `${OUTCOMES[each.outcome]?.[0] ?? each.outcome}, reward ${fixed(each.reward)}${each.kind === 'greedy' ? ', greedy' : ''}`
  return (
    <div class="beside">
      <section aria-label={`${run}, step ${step}`}>
        <h2>{run}, step {step}</h2>
        <p class="dim">{worth(answer)}</p>
        {props.children}
      </section>
      <section aria-label={`Beside: ${other}`}>
        <h2>{other}{row && rows.length > 0 && (
          <>, step <select aria-label="Step beside" value={String(row.step)} onChange={(event) => change({ beside_step: event.currentTarget.value, beside_answer: null })}>
            {rows.map((each) => <option value={String(each.step)}>{each.step}: {OUTCOMES[each.outcome]?.[0] ?? each.outcome}, {number(each.accuracy, 'share')} right</option>)}
          </select></>
        )}</h2>
        {(followed.error ?? error) && <Problem>{followed.error ?? error}</Problem>}
        {followed.data && !row && <Empty>{followed.data.is_done ? `${other} has not asked this prompt ${other === run ? 'in another step' : 'so far'}.` : `Looking for the prompt: ${followed.data.read} of ${followed.data.steps} steps are read.`}</Empty>}
        {shown && (
          <>
            <p class="dim">
              {worth(shown)}{' '}
              {answers.length > 1 && (
                <select aria-label="Answer beside" value={keyOf(shown)} onChange={(event) => change({ beside_answer: event.currentTarget.value })}>
                  {answers.map((each) => <option value={keyOf(each)}>{each.kind === 'greedy' ? 'greedy' : `answer ${each.answer + 1}`}: reward {fixed(each.reward)}</option>)}
                </select>
              )}
            </p>
            {shown.prompt !== null && answer.prompt !== null && shown.prompt !== answer.prompt && (
              <>
                <Problem>The same id, {uid}, stands for another prompt there: {shown.prompt.slice(0, 300)}</Problem>
                <Images run={other} paths={shown.images ?? []} />
              </>
            )}
            <Tokens run={other} answer={shown} meanings={found!.meanings} without={found!.without_tokens} coloring={props.coloring} search="" />
          </>
        )}
      </section>
    </div>
  )
}

/** The name of an answer within its group, such as s0 or g0: a greedy one beside sampled ones. */
export const keyOf = (answer: Answer) => `${answer.kind[0]}${answer.answer}`
