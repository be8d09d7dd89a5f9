// Small parts that several pages use.
import type { ComponentChildren } from 'preact'
import { useEffect, useState } from 'preact/hooks'
import { query, useData, type Run } from './api'
import { change } from './route'

export function Problem({ children }: { children: ComponentChildren }) {
  return <p class="problem" role="alert">{children}</p>
}

export function Empty({ children }: { children: ComponentChildren }) {
  return <p class="empty">{children}</p>
}

export function Problems({ lines }: { lines: string[] }) {
  if (!lines.length) return null
  const shown = lines.slice(0, 3)
  const rest = lines.length - shown.length
  return (
    <div class="problem" role="alert">
      {shown.map((line) => <div>{line}</div>)}
      {rest > 0 && <div>… and {rest} more</div>}
    </div>
  )
}

/** Images of a run as thumbnails of one height, each a link to itself. */
export function Images({ run, paths }: { run: string; paths: string[] }) {
  if (!paths.length) return null
  return (
    <p class="thumbs">
      {paths.map((name) => {
        const url = query('run/image', { run, name })
        return (
          <a href={url} target="_blank" rel="noreferrer" title={name}>
            <img src={url} alt={name} loading="lazy" onLoad={({ currentTarget: image }) => image.classList.toggle('tiny', image.naturalHeight < image.height)} />
          </a>
        )
      })}
    </p>
  )
}

export function Choice<T extends string>(props: {
  label: string
  value: T
  options: [T, string][]
  onChange: (value: T) => void
}) {
  return (
    <div class="choice" role="radiogroup" aria-label={props.label}>
      {props.options.map(([value, text]) => (
        <button
          type="button"
          role="radio"
          aria-checked={value === props.value}
          onClick={() => props.onChange(value)}
        >
          {text}
        </button>
      ))}
    </div>
  )
}

export function Legend({ items }: { items: { color: string; label: string; dashed?: boolean }[] }) {
  return (
    <div class="legend">
      {items.map((each) => (
        <span>
          <i class={each.dashed ? 'dashed' : ''} style={{ background: each.color }} />
          {each.label}
        </span>
      ))}
    </div>
  )
}

interface Words {
  name: string
  unit: string
  meaning: string
  healthy: string
}

/** The title of a chart, which on hover, focus or tap says what its metrics are: the words of `winnow metrics`. */
function Title({ title, figures, about }: { title: string; figures: string[]; about?: [meaning: string, healthy: string] }) {
  const [isOpen, open] = useState(false)
  const { data } = useData<Words[]>(isOpen && figures.length ? query('words', { names: figures }) : null, [])
  const all = about ? [{ name: '', unit: '', meaning: about[0], healthy: about[1] }] : (data ?? [])
  return (
    <>
      <h2 onMouseEnter={() => open(true)} onMouseLeave={() => open(false)}>
        <button type="button" class="explained" aria-expanded={isOpen} onFocus={() => open(true)} onBlur={() => open(false)} onClick={() => open(true)}
          onKeyDown={(event) => event.key === 'Escape' && open(false)}>{title}</button>
      </h2>
      {isOpen && all.length > 0 && (
        <div class="words" role="tooltip">
          {all.map((each) => (
            <p>
              {each.name && <code>{each.name}</code>}{each.unit && <span class="dim"> {each.unit}</span>}{each.name && <br />}
              {each.meaning}
              {each.healthy && <><br /><b class="good">Healthy:</b> {each.healthy}</>}
            </p>
          ))}
        </div>
      )}
    </>
  )
}

export function Panel(props: {
  title: string
  /** Names of the metrics that it shows, which its title explains; `about` of what is no metric. */
  figures?: string[]
  about?: [meaning: string, healthy: string]
  unit?: string
  side?: ComponentChildren
  children: ComponentChildren
  class?: string
}) {
  return (
    <section class={`panel ${props.class ?? ''}`} aria-label={props.title}>
      <header>
        {props.figures || props.about ? <Title title={props.title} figures={props.figures ?? []} about={props.about} /> : <h2>{props.title}</h2>}
        {props.unit && <span class="unit">{props.unit}</span>}
        <div class="side">{props.side}</div>
      </header>
      {props.children}
    </section>
  )
}

export function RunChoice({ runs, run }: { runs: Run[]; run: string }) {
  return (
    <label class="field">
      Run
      <select
        value={run}
        onChange={(event) =>
          change({ run: event.currentTarget.value, step: null, group: null, uid: null }, true)}
      >
        {runs.map((each) => <option value={each.name}>{each.name}</option>)}
      </select>
    </label>
  )
}

/** Chooses one of some steps: before, next, or by number. */
export function StepChoice(props: {
  steps: number[]
  step: number
  onChange: (step: number) => void
}) {
  const { steps, step, onChange } = props
  const [typed, type] = useState(String(step))
  useEffect(() => type(String(step)), [step])
  const at = nearest(steps, step)
  const go = (place: number) => steps[place] !== undefined && onChange(steps[place])
  return (
    <div class="stepper">
      <button type="button" aria-label="Step before" disabled={at <= 0} onClick={() => go(at - 1)}>
        ‹
      </button>
      <label>
        step{' '}
        <input
          inputMode="numeric"
          value={typed}
          aria-label="Step"
          onInput={(event) => type(event.currentTarget.value)}
          onChange={(event) => {
            const wanted = Number(event.currentTarget.value)
            if (Number.isFinite(wanted)) go(nearest(steps, wanted))
            else type(String(step))
          }}
        />
      </label>
      <button
        type="button"
        aria-label="Next step"
        disabled={at >= steps.length - 1}
        onClick={() => go(at + 1)}
      >
        ›
      </button>
      <span class="dim">of {steps.length ? steps[steps.length - 1] : '–'}</span>
    </div>
  )
}

export function nearest(steps: number[], wanted: number): number {
  let best = -1
  steps.forEach((step, place) => {
    if (best < 0 || Math.abs(step - wanted) < Math.abs(steps[best] - wanted)) best = place
  })
  return best
}

/** Keys that do something on a page, unless somebody types into a field. */
export function useKeys(keys: Record<string, (event: KeyboardEvent) => void>): void {
  useEffect(() => {
    const listener = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement
      const types = /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName)
      if (event.ctrlKey || event.metaKey || event.altKey || (types && event.key !== 'Escape')) return
      const action = keys[event.key]
      if (action) {
        event.preventDefault()
        action(event)
      }
    }
    window.addEventListener('keydown', listener)
    return () => window.removeEventListener('keydown', listener)
  })
}
