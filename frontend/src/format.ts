// Numbers as people read them, each with its unit.
export type Unit = 'share' | 'tokens' | 'nats' | 'seconds' | 'gib' | 'rate' | 'count' | 'plain'

const grouped = new Intl.NumberFormat('en-US', { maximumFractionDigits: 0 })

export function compact(value: number): string {
  const size = Math.abs(value)
  if (size >= 1e9) return `${trim(value / 1e9)} G`
  if (size >= 1e6) return `${trim(value / 1e6)} M`
  if (size >= 1e4) return `${trim(value / 1e3)} k`
  return size >= 1000 ? grouped.format(value) : trim(value)
}

function trim(value: number): string {
  const size = Math.abs(value)
  const digits = size >= 100 || Number.isInteger(value) ? 0 : size >= 10 ? 1 : 2
  return value.toFixed(digits)
}

export function duration(seconds: number): string {
  if (seconds > 0 && seconds < 0.1) return `${(1000 * seconds).toPrecision(2)} ms`
  if (seconds < 10) return `${seconds.toFixed(seconds < 1 ? 2 : 1)} s`
  if (seconds < 60) return `${seconds.toFixed(0)} s`
  const whole = Math.round(seconds)
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60]
  const two = (n: number) => String(n).padStart(2, '0')
  return hours ? `${hours}:${two(minutes)}:${two(rest)} h` : `${minutes}:${two(rest)} min`
}

/** A name without its middle, where it is long: runs often differ at the end. */
export function middle(text: string, most: number): string {
  const half = Math.floor((most - 1) / 2)
  return text.length > most ? `${text.slice(0, half)}…${text.slice(-half)}` : text
}

const minus = (text: string) => text.replace('-', '−')

export function number(value: number | null | undefined, unit: Unit = 'plain'): string {
  return value === null || value === undefined ? '–' : minus(worded(value, unit))
}

/** With two digits, such as a reward. */
export const fixed = (value: number | null | undefined) => (value == null ? '–' : minus((Math.abs(value) < 0.005 ? 0 : value).toFixed(2)))

function worded(value: number, unit: Unit): string {
  switch (unit) {
    case 'share':
      return `${(100 * value).toFixed(1)} %`
    case 'tokens':
    case 'count':
      return Math.abs(value) < 1000 && !Number.isInteger(value) ? value.toFixed(1) : compact(value)
    case 'rate':
      return `${compact(value)}/s`
    case 'seconds':
      return duration(value)
    case 'gib':
      return `${value.toFixed(2)} GiB`
    default:
      return plain(value)
  }
}

function plain(value: number): string {
  if (value === 0 || Number.isInteger(value)) return compact(value)
  const size = Math.abs(value)
  if (size < 1e-3 || size >= 1e6) return value.toExponential(2).replace('e', ' e').replace('e-', 'e−')
  return size >= 100 ? value.toFixed(1) : value.toPrecision(3)
}

/** Digits behind the point that multiples of a number need. */
function decimals(step: number): number {
  let digits = 0
  for (let x = step; digits < 12 && Math.abs(x - Math.round(x)) > 1e-6 * x; x *= 10) digits += 1
  return digits
}

/** Label of an axis whose labels are `step` apart: no two are the same, and the unit stands in the title. */
export function tick(value: number, unit: Unit, step: number): string {
  if (unit === 'share') return minus(`${(100 * value).toFixed(decimals(100 * step))} %`)
  if (Math.abs(value) < 1e-9 * step) return '0'
  if (unit === 'seconds') {
    if (step < 0.01) return minus(`${(1000 * value).toFixed(decimals(1000 * step))} ms`)
    if (step < 1 || Math.abs(value) < 60) return minus(`${value.toFixed(decimals(step))} s`)
    return duration(value).replace(/ (min|h)$/, '')
  }
  const size = Math.abs(value)
  if (size < 1e-3) return value.toExponential(decimals(step / 10 ** Math.floor(Math.log10(size)))).replace(/-/g, '−')
  const [scale, letter] = size >= 1e9 ? [1e9, ' G'] : size >= 1e6 ? [1e6, ' M'] : size >= 1e4 ? [1e3, ' k'] : [1, '']
  const digits = decimals(step / scale)
  return minus(`${(value / scale).toLocaleString('en-US', { minimumFractionDigits: digits, maximumFractionDigits: digits })}${letter}`)
}

const SIXTIES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000]

/** The round number of which a range has about `count` multiples; it divides 1 if that is a share's. */
export function spacing(range: number, unit: Unit, count: number): number {
  const wish = range / count
  const sixty = unit === 'seconds' && wish > 0.5 ? SIXTIES.find((each) => each >= wish) : undefined
  if (sixty) return sixty
  const power = 10 ** Math.floor(Math.log10(wish))
  const digit = (unit === 'share' ? [1, 2, 2.5, 5, 10] : [1, 2, 5, 10]).find((each) => each * power > 0.999 * wish) ?? 10
  return unit === 'count' ? Math.max(digit * power, 1) : digit * power
}

export function ago(seconds: number): string {
  const s = Date.now() / 1000 - seconds
  if (s < 60) return 'just now'
  if (s < 3600) return `${Math.floor(s / 60)} min ago`
  if (s < 86400) return `${Math.floor(s / 3600)} h ago`
  return `${Math.floor(s / 86400)} d ago`
}

export const OUTCOMES: Record<string, [label: string, why: string]> = {
  trained: ['trained', 'Kept: its answers differ in worth, so the policy learns from them.'],
  all_right: ['all right', 'Dropped: every answer is right, so none is better than the others.'],
  all_wrong: ['all wrong', 'Dropped: every answer is wrong, so none is better than the others.'],
  surplus: ['surplus', 'Dropped: the step was full; the prompt went back to the data.'],
  stale: ['too old', 'Dropped: its tokens are older than the recipe allows (sampling.max_staleness).'],
  failed: ['failed', 'Dropped: scoring failed, so its worth is not known.'],
  held_out: ['held out', 'An evaluation: nothing is learnt from it.'],
  held_out_greedy: ['greedy', 'An evaluation without randomness: nothing is learnt from it.'],
}
