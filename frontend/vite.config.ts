// Builds the front end into the Python package, with the licences of what is bundled and a hash of
// the sources, by which a test tells whether the build is theirs.
import { createHash } from 'node:crypto'
import { readdirSync, readFileSync, writeFileSync } from 'node:fs'
import { join, relative } from 'node:path'
import { defineConfig } from 'vite'

const here = import.meta.dirname
const out = join(here, '../src/winnow/dashboard/static')
const SINGLE = ['index.html', 'package.json', 'package-lock.json', 'tsconfig.json', 'vite.config.ts']
const BUNDLED = ['preact', 'echarts', 'zrender', 'tslib', 'inter-ui']

function filesIn(folder: string): string[] {
  return readdirSync(join(here, folder), { recursive: true, withFileTypes: true })
    .filter((each) => each.isFile())
    .map((each) => relative(here, join(each.parentPath, each.name)))
}

function sourcesHash(): string {
  const hash = createHash('sha256')
  for (const name of [...SINGLE, ...filesIn('src'), ...filesIn('public')].sort()) {
    hash.update(`${name}\n`).update(readFileSync(join(here, name)))
  }
  return hash.digest('hex')
}

function licences(): string {
  return BUNDLED.map((name) => {
    const folder = join(here, 'node_modules', name)
    const { version, license } = JSON.parse(readFileSync(join(folder, 'package.json'), 'utf8'))
    const files = readdirSync(folder, { recursive: true, withFileTypes: true })
      .map((each) => [each, relative(folder, join(each.parentPath, each.name))] as const)
      .filter(([each, path]) => each.isFile() && /^(licen[cs]es?\b|notice)/i.test(path))
      .map(([, path]) => path).sort()
    if (!files.length) throw new Error(`${name} has no licence file`)
    const texts = files.map((each) => readFileSync(join(folder, each), 'utf8').trim())
    return [`${name} ${version} (${license})`, '='.repeat(72), ...texts].join('\n\n')
  }).join('\n\n\n')
}

export default defineConfig({
  build: {
    outDir: out,
    emptyOutDir: true,
    target: ['chrome123', 'firefox121', 'safari17.5'],
    assetsInlineLimit: 0,
    chunkSizeWarningLimit: 1000,
    modulePreload: { polyfill: false },
    // Names without a hash: a new build is a change of the same files.
    rolldownOptions: {
      output: {
        entryFileNames: 'assets/app.js',
        assetFileNames: ({ names }) =>
          names[0]?.endsWith('.css') ? 'assets/app.css' : 'assets/[name][extname]',
      },
    },
  },
  oxc: { jsx: { runtime: 'automatic', importSource: 'preact' } },
  plugins: [
    {
      name: 'winnow',
      closeBundle() {
        writeFileSync(join(out, 'LICENSES.txt'), licences() + '\n')
        writeFileSync(join(out, 'sources.sha256'), sourcesHash() + '\n')
      },
    },
  ],
})
