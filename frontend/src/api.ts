// Data of the pages: fetched as JSON, fetched again when the server tells that a run has changed.
import { useEffect, useRef, useState } from 'preact/hooks'

export interface Run {
  name: string
  place: string
  /** Name of the recipe that it was made with, where that was recorded. */
  recipe: string | null
  /** The same for runs that differ in the seed alone. */
  group: string
  problem: string | null
  step: number
  steps: number
  state: 'done' | 'live' | 'idle'
  /** Why it has no record yet; null where it has one. */
  waiting: string | null
  changed_s: number | null
  accuracy: number | null
  held_out: Record<string, number | null>
  /** Findings of the rules of `winnow doctor` so far. */
  alarms: number
  /** Mean seconds of its last steps, and until it is done; null where that is not known. */
  step_s: number | null
  left_s: number | null
  /** Those in which the runs differ. */
  settings?: Record<string, string | number | boolean | null>
}
export type Values = (number | null)[]
/** Points of figures; where a run has many steps, neighbours share one, whose step is their last. */
export interface Curves {
  step: number[]
  /** Lines of the record that a point is made of. */
  rows: number[]
  steps: number
  tokens: number[]
  time_s: number[]
  every: number
  /** Sums, means or extremes over the lines of a point, by what the figure is. */
  values: Record<string, Values>
  /** The least and the largest line of each point in their order, of figures where these differ. */
  extremes: Record<string, [Values, Values]>
  /** Sums over all lines, of figures that can be summed. */
  totals: Record<string, number | null>
  problems: string[]
}

/** A figure as it is in one step, on average over those of a point. */
export function ofStep(curves: Curves, name: string): Values {
  const values = curves.values[name] ?? []
  return name in curves.totals ? values.map((value, at) => (value === null ? null : value / curves.rows[at])) : values
}

/** The steps of a point. */
export const stepsOf = (curves: Curves, at: number): string =>
  curves.rows[at] > 1 ? `steps ${curves.step[at] - curves.rows[at] + 1} to ${curves.step[at]}, each` : `step ${curves.step[at]}`

export interface Groups {
  group: number[]
  uid: string[]
  source: string[]
  outcome: string[]
  answers: number[]
  accuracy: Values
  reward: Values
  reward_std: Values
  length: Values
  longest: Values
  staleness: Values
  cut_off: number[]
  overlong: number[]
  failed: number[]
  mismatch: Values
  prompt: (string | null)[]
}
export interface Pieces {
  texts: string[]
  special: number[]
}
/** A turn of a conversation; its text in pieces, which are calls or not. */
export interface Turn {
  author: string
  tokens: number
  reward: number | null
  calls: number | null
  malformed: number | null
  pieces: [string, boolean][]
  images?: string[] | null
}
export interface Answer {
  answer: number
  kind: string
  prompt: string | null
  response: string | null
  outcome: string
  reward: number
  accuracy: number
  advantage: number | null
  response_tokens: number
  prompt_tokens: number
  finish_reason: string | null
  scorer_error: string | null
  staleness: number | null
  oldest_version: number | null
  newest_version: number | null
  pred: string | null
  data_source: string
  prompt_uid: string
  columns: Record<string, Values>
  tokens?: Pieces
  turns?: Turn[] | null
  /** Paths of images in the run's folder: the prompt's, then those of its turns. */
  images?: string[] | null
  prompt_pieces?: Pieces
  [more: string]: unknown
}

const listeners = new Set<(changed: Set<string> | null) => void>()
let state: 'live' | 'lost' = 'lost'

/** A page that nobody sees asks nothing: a browser opens few connections to one server. */
export function listen(): void {
  if (document.hidden) document.addEventListener('visibilitychange', listen, { once: true })
  else open()
}

function open(): void {
  const source = new EventSource('/api/events')
  const hide = () => {
    if (!document.hidden) return
    document.removeEventListener('visibilitychange', hide)
    source.close()
    state = 'lost'
    listen()
  }
  document.addEventListener('visibilitychange', hide)
  source.onmessage = (event) => {
    const told = JSON.parse(event.data) as { changed: string[]; gone: string[] }
    // After a break anything may have changed.
    const all = state === 'lost'
    state = 'live'
    const names = all || told.gone.length ? null : new Set(told.changed)
    if (names === null || names.size) listeners.forEach((each) => each(names))
    else stateListeners.forEach((each) => each())
    if (all) stateListeners.forEach((each) => each())
  }
  source.onerror = () => {
    state = 'lost'
    // Refused: a browser tries again by itself only where there was no answer.
    if (source.readyState === EventSource.CLOSED) {
      document.removeEventListener('visibilitychange', hide)
      setTimeout(listen, 5000)
    }
    stateListeners.forEach((each) => each())
  }
}

const stateListeners = new Set<() => void>()

export function useConnection(): 'live' | 'lost' {
  const [, again] = useState(0)
  useEffect(() => {
    const listener = () => again((n) => n + 1)
    stateListeners.add(listener)
    return () => void stateListeners.delete(listener)
  }, [])
  return state
}

export function query(path: string, words: Record<string, string | number | string[] | null>): string {
  const found = new URLSearchParams()
  for (const [name, value] of Object.entries(words)) {
    if (Array.isArray(value)) value.forEach((each) => found.append(name, each))
    else if (value !== null && value !== '') found.set(name, String(value))
  }
  const text = found.toString()
  return `/api/${path}${text ? '?' + text : ''}`
}

export interface Loaded<T> {
  data: T | null
  error: string | null
  /** The data is of another address, while that of this one is on its way. */
  stale: boolean
  again: () => void
}

/** Fetches an address (null: none), and again when one of the runs changes; null: at any change. */
export function useData<T>(url: string | null, runs: string[] | null): Loaded<T> {
  const [held, hold] = useState<{ url: string | null; data: T | null; error: string | null }>({
    url: null,
    data: null,
    error: null,
  })
  const [turn, again] = useState(0)
  const watched = useRef(runs)
  watched.current = runs
  useEffect(() => {
    let timer = 0
    const listener = (changed: Set<string> | null) => {
      const mine = watched.current
      if (changed && mine && !mine.some((name) => changed.has(name))) return
      clearTimeout(timer)
      timer = setTimeout(() => again((n) => n + 1), 50) as unknown as number
    }
    listeners.add(listener)
    return () => {
      clearTimeout(timer)
      listeners.delete(listener)
    }
  }, [])
  useEffect(() => {
    if (url === null) return
    const stop = new AbortController()
    load<T>(url, stop.signal)
      .then((data) => hold({ url, data, error: null }))
      .catch((error: Error) => {
        if (error.name !== 'AbortError') {
          hold((old) => ({ url, data: old.url === url ? old.data : null, error: error.message }))
        }
      })
    return () => stop.abort()
  }, [url, turn])
  if (url === null) return { data: null, error: null, stale: false, again: () => {} }
  return {
    data: held.data,
    error: held.url === url ? held.error : null,
    stale: held.url !== url,
    again: () => again((n) => n + 1),
  }
}

export async function load<T>(url: string, signal?: AbortSignal): Promise<T> {
  const answer = await ask(url, { signal })
  return (await answer.json()) as T
}

async function ask(url: string, options: RequestInit): Promise<Response> {
  let answer: Response
  try {
    answer = await fetch(url, options)
  } catch (error) {
    if ((error as Error).name === 'AbortError') throw error
    throw new Error('The dashboard does not answer. Is `winnow dashboard` still running?')
  }
  if (answer.ok) return answer
  const body = await answer.json().catch(() => null)
  throw new Error(body?.error ?? `The dashboard failed (${answer.status}).`)
}

/** Posts a body, and hands on each line of JSON of the reply as it comes. */
export async function stream<T>(url: string, body: unknown, signal: AbortSignal, hear: (line: T) => void): Promise<void> {
  const headers = { 'Content-Type': 'application/json' }
  const answer = await ask(url, { method: 'POST', headers, body: JSON.stringify(body), signal })
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader()
  let rest = ''
  for (;;) {
    const { done, value } = await reader.read()
    const lines = (rest + (value ?? '')).split('\n')
    rest = lines.pop()!
    lines.forEach((line) => hear(JSON.parse(line) as T))
    if (done) return
  }
}
