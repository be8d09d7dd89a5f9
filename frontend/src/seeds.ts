// Runs that differ in the seed alone, as one: their mean, and its 95 % interval by Student's t, as `winnow plot` draws them.
import type { Run } from './api'

/** Place, mean, step (the last), number of steps; the least and the largest of these in their order. */
export type Point = [number, number, number, number, number, number]
export const INTERVAL = 'Bands and ± are the 95 % interval of the mean over the seeds (Student’s t), as winnow plot draws it; each step is over the runs that have it.'
/** What |t| exceeds with a chance of 5 %, for 1, 2 … degrees of freedom. */
const BOUNDS = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131, 2.12, 2.11, 2.101, 2.093, 2.086, 2.08, 2.074, 2.069, 2.064, 2.06, 2.056, 2.052, 2.048, 2.045]
const PLACES = 200

/** Mean, and half of its interval; null of a single value. */
export function interval(values: number[]): [mean: number, half: number | null] {
  const degrees = values.length - 1
  const mean = values.reduce((a, b) => a + b, 0) / values.length
  if (degrees < 1) return [mean, null]
  const variance = values.reduce((sum, each) => sum + (each - mean) ** 2, 0) / degrees
  return [mean, (BOUNDS[degrees - 1] ?? 1.96 + 2.4 / degrees) * Math.sqrt(variance / values.length)]
}

/** The mean curve of several: at all their steps, or at even places of another axis; between its points a run is interpolated. */
export function average(traces: [number, number, ...number[]][][], isOfSteps: boolean): { points: Point[]; halves: number[] } {
  const first = Math.min(...traces.map((each) => each[0][0]))
  const last = Math.max(...traces.map((each) => each[each.length - 1][0]))
  const places = isOfSteps
    ? [...new Set(traces.flatMap((each) => each.map(([x]) => x)))].sort((a, b) => a - b)
    : Array.from({ length: PLACES }, (_, n) => first + ((last - first) * n) / (PLACES - 1))
  const rows = traces.map(() => 0)
  const found = places.map((x) => interval(traces.flatMap((trace, n) => {
    while (rows[n] < trace.length - 1 && trace[rows[n]][0] < x) rows[n] += 1
    const [after, before] = [trace[rows[n]], trace[rows[n] - 1]]
    if (after[0] === x) return [after[1]]
    return after[0] < x || !before ? [] : [before[1] + ((after[1] - before[1]) * (x - before[0])) / (after[0] - before[0])]
  })))
  const points = places.map((x, n): Point => [x, found[n][0], isOfSteps ? x : NaN, 1, found[n][0], found[n][0]]).filter(([, y]) => !Number.isNaN(y))
  return { points, halves: found.filter(([y]) => !Number.isNaN(y)).map(([, half]) => half ?? 0) }
}

export interface Group {
  /** The name of its first run, by which it has its colour. */
  key: string
  label: string
  runs: Run[]
}

/** Groups of runs in the order of their first; each run its own, unless those of one recipe are put together. */
export function grouped(runs: Run[], isTogether: boolean): Group[] {
  const bySettings = new Map<string, Run[]>()
  for (const run of runs) {
    const key = isTogether && !run.problem ? run.group : run.place
    bySettings.set(key, [...(bySettings.get(key) ?? []), run])
  }
  const groups = [...bySettings.values()].map((alike) => ({ key: alike[0].name, label: stem(alike), runs: alike }))
  return groups.map(({ key, label, runs: [first, ...others] }) => {
    // Of groups whose names are the same, each is named by settings, too.
    const namesakes = groups.filter((each) => each.label === label).map((each) => each.runs[0].settings)
    const is = (of: Run['settings'], name: string) => of?.[name] === first.settings?.[name]
    const apart = Object.keys(first.settings ?? {}).filter((name) => others.every((each) => is(each.settings, name)) && !namesakes.every((each) => is(each, name)))
    return { key, label: [label, ...apart.slice(0, 2).map((name) => `${name}=${first.settings![name]}`)].join(' '), runs: [first, ...others] }
  })
}

/** What the names of some runs begin with. */
function stem(runs: Run[]): string {
  const [{ name }] = runs
  if (runs.length === 1) return name
  let end = name.length
  while (!runs.every((each) => each.name.startsWith(name.slice(0, end)))) end -= 1
  return name.slice(0, end).replace(/[-_.\d]+$/, '') || name
}
