// The frame of the pages: navigation, theme, help, and the connection to the server.
import { render } from 'preact'
import { useEffect, useRef, useState } from 'preact/hooks'
import { Account } from './account'
import { Alarms } from './alarms'
import { Answers } from './answers'
import { listen, useConnection, useData, type Run } from './api'
import { themeChanged } from './chart'
import { ConfigPage } from './config'
import { Overview } from './overview'
import { Empty, Problem, useKeys } from './parts'
import { PlanPage } from './plan'
import { link, useRoute } from './route'
import './style.css'
import { System } from './system'
import { Time } from './time'

const PAGES = { overview: 'Overview', answers: 'Answers', tokens: 'Tokens', time: 'Time', system: 'System', alarms: 'Alarms', plan: 'Plan', config: 'Configuration' }
type Page = keyof typeof PAGES
const VIEWS = { overview: Overview, answers: Answers, tokens: Account, time: Time, system: System, alarms: Alarms, plan: PlanPage, config: ConfigPage }
const THEMES = ['system', 'light', 'dark'] as const
type Theme = (typeof THEMES)[number]
const HELP: [string, string][] = [
  ['1 … 8', 'pages'],
  ['j k  or  ↓ ↑', 'next prompt, the one before'],
  ['l h  or  → ←', 'next answer, the one before'],
  ['] [', 'next step, the one before'],
  ['/', 'search in the texts of the step; Esc leaves the field'],
  ['c', 'colour tokens by the next number'],
  ['t', 'light, dark, or as the system has it'],
  ['?', 'this list'],
]

function useThemeChoice(): [Theme, (theme: Theme) => void] {
  const [theme, choose] = useState<Theme>((localStorage.getItem('theme') as Theme) ?? 'system')
  useEffect(() => {
    document.documentElement.dataset.theme = theme
    localStorage.setItem('theme', theme)
    themeChanged()
  }, [theme])
  return [theme, choose]
}

function App() {
  const { page, words: asked } = useRoute()
  const [theme, choose] = useThemeChoice()
  const [isHelping, help] = useState(false)
  const connection = useConnection()
  const { data, error } = useData<{ runs: Run[]; first: string | null }>('/api/runs', null)
  const first = useRef<string | null>(null)
  const runs = data?.runs
  const isThere = (name: string | null) => runs?.some((each) => each.name === name)
  // Chosen once: a page does not change under its reader when another run begins.
  if (data && !isThere(first.current)) first.current = data.first
  const words = new URLSearchParams(asked)
  if (first.current) {
    if (!words.get('run')) words.set('run', words.get('runs') ?? first.current)
    if (!words.getAll('runs').some(isThere)) words.set('runs', isThere(words.get('run')) ? words.get('run')! : first.current)
  }
  const run = words.get('run')
  const to = (target: Page) => link(target, target === 'overview' ? { runs: run === null ? [] : asked.getAll('runs').length ? asked.getAll('runs') : [run] } : { run })
  const nextTheme = () => choose(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length])
  const names = Object.keys(PAGES) as Page[]
  useKeys({
    '?': () => help(!isHelping),
    Escape: () => help(false),
    t: nextTheme,
    ...Object.fromEntries(names.map((name, n) => [String(n + 1), () => { location.hash = to(name) }])),
  })
  const current = (page in PAGES ? page : 'overview') as Page
  useEffect(() => { document.title = `${PAGES[current]}${run ? ` · ${run}` : ''} · Winnow` }, [current, run])
  const View = VIEWS[current]
  const readable = runs?.filter((each) => !each.problem)
  const isUnknown = run !== null && runs !== undefined && !isThere(run)
  return (
    <>
      <nav>
        <a class="brand" href="#/overview"><img src="/icon.svg" alt="" width="18" height="18" />Winnow</a>
        {names.map((name) => <a href={to(name)} aria-current={name === current ? 'page' : undefined}>{PAGES[name]}</a>)}
        <span class={`connection ${connection}`} title={connection === 'live' ? 'Pages change as the runs do' : 'No connection: what is shown may be old'}>{connection === 'live' ? 'live' : 'not connected'}</span>
        <button type="button" onClick={nextTheme} aria-label={`Theme: ${theme}`}>{theme === 'system' ? 'Auto' : theme === 'light' ? 'Light' : 'Dark'}</button>
        <button type="button" onClick={() => help(!isHelping)} aria-label="Keys">?</button>
      </nav>
      <main>
        {error && <Problem>{error}</Problem>}
        {isUnknown && <Problem>There is no run {run} (any more). Choose another one.</Problem>}
        {runs && !runs.length && <Empty>No runs here yet. A run appears as soon as it is started: winnow train quickstart</Empty>}
        {readable && (current === 'overview' ? runs!.length > 0 : readable.length > 0) && !(isUnknown && current !== 'overview') && <View key={current === 'overview' ? '' : `${current} ${run}`} runs={current === 'overview' ? runs! : readable} words={words} />}
      </main>
      {isHelping && (
        <div class="veil" onClick={() => help(false)}>
          <div class="help" role="dialog" aria-label="Keys" onClick={(event) => event.stopPropagation()}>
            <h2>Keys</h2>
            <dl>{HELP.map(([keys, what]) => <><dt>{keys}</dt><dd>{what}</dd></>)}</dl>
          </div>
        </div>
      )}
    </>
  )
}

listen()
render(<App />, document.getElementById('app')!)
