// All settings of a run: by section, beside its recipe's, the defaults and another run's.
import { query, useData, type Run } from './api'
import { Choice, Empty, Panel, Problem, RunChoice } from './parts'
import { change } from './route'

type Values = Record<string, unknown>
interface Settings {
  recipe: string | null
  values: Values
  defaults: Values
  /** Null where the recipe is not one that ships with Winnow. */
  recipe_values: Values | null
  meanings: Record<string, string>
}
type Show = 'all' | 'changed' | 'apart'

const text = (values: Values, key: string) => (key in values ? (values[key] === '' ? '""' : String(values[key])) : '–')

export function ConfigPage({ runs, words }: { runs: Run[]; words: URLSearchParams }) {
  const run = words.get('run') ?? ''
  const other = runs.some((each) => each.name === words.get('other') && each.name !== run) ? words.get('other') : null
  const typed = words.get('q') ?? ''
  const show = (other || words.get('show') !== 'apart' ? words.get('show') ?? 'all' : 'all') as Show
  const { data, error } = useData<Settings>(query('run/settings', { run }), [run])
  const theirs = useData<Settings>(other && query('run/settings', { run: other }), other ? [other] : [])
  const beside = other && !theirs.stale ? theirs.data : null
  const bar = (
    <div class="bar">
      <RunChoice runs={runs} run={run} />
      <label class="field">
        Compare with
        <select value={other ?? ''} onChange={(event) => change({ other: event.currentTarget.value })}>
          <option value="">no other run</option>
          {runs.filter((each) => each.name !== run).map((each) => <option value={each.name}>{each.name}</option>)}
        </select>
      </label>
      <input type="search" aria-label="Search settings" placeholder="part of a name, value or meaning" value={typed} onInput={(event) => change({ q: event.currentTarget.value })} />
    </div>
  )
  if (!data) return <div class="page">{bar}{error && <Problem>{error}</Problem>}</div>
  const base = data.recipe_values ?? data.defaults
  const from = data.recipe_values ? `recipe ${data.recipe}` : 'defaults'
  const isChanged = (key: string) => text(data.values, key) !== text(base, key)
  const isApart = (key: string) => beside !== null && text(data.values, key) !== text(beside.values, key)
  const keys = [...new Set([...Object.keys(data.values), ...Object.keys(beside?.values ?? {})])]
  const filters: Record<Show, (key: string) => boolean> = { all: () => true, changed: isChanged, apart: isApart }
  const options: [Show, string][] = [['all', `All ${keys.length}`], ['changed', `${keys.filter(isChanged).length} changed from the ${from}`]]
  if (beside) options.push(['apart', `${keys.filter(isApart).length} that differ from ${other}`])
  const word = typed.toLowerCase()
  const has = (key: string) => [key, text(data.values, key), data.meanings[key] ?? '', beside ? text(beside.values, key) : ''].some((each) => each.toLowerCase().includes(word))
  const shown = keys.filter((key) => filters[show](key) && has(key))
  const sections = [...new Set(shown.map((key) => key.split('.')[0]))]
  return (
    <div class="page config">
      {bar}
      {theirs.error && <Problem>{theirs.error}</Problem>}
      <div class="bar">
        <Choice label="Settings" value={show} options={options} onChange={(value) => change({ show: value })} />
        <span class="dim">
          {data.recipe ? `Made with ${data.recipe}${data.recipe_values ? '' : ', a file that does not ship with Winnow: marked is what differs from the defaults'}.` : 'Its recipe was not recorded: marked is what differs from the defaults.'}
          {' '}A value of the environment is shown as it was written, {'${oc.env:NAME}'}.
        </span>
      </div>
      {sections.map((section) => {
        const rows = shown.filter((key) => key.split('.')[0] === section)
        return (
          <Panel title={section} unit={`${rows.length}`} key={section}>
            <div class="scroll">
              <table class="settings">
                <thead><tr><th>Setting</th><th>{run}</th>{beside && <th>{other}</th>}{data.recipe_values && <th>Recipe {data.recipe}</th>}<th>Default</th></tr></thead>
                <tbody>
                  {rows.map((key) => (
                    <tr key={key} class={isChanged(key) ? 'changed' : ''}>
                      <td title={data.meanings[key]}><code>{key}</code></td>
                      <td class="value" title={isChanged(key) ? `The ${from} would give ${text(base, key)}` : undefined}>{text(data.values, key)}</td>
                      {beside && <td class={isApart(key) ? 'apart' : 'dim'}>{text(beside.values, key)}</td>}
                      {data.recipe_values && <td class="dim">{text(data.recipe_values, key)}</td>}
                      <td class="dim">{text(data.defaults, key)}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </div>
          </Panel>
        )
      })}
      {!shown.length && <Empty>No setting is so.</Empty>}
    </div>
  )
}
