// The address holds everything that is looked at, so that a link shows the same to others.
import { useEffect, useState } from 'preact/hooks'

export type Words = Record<string, string | number | string[] | null>
export interface Route {
  page: string
  words: URLSearchParams
}

function read(): Route {
  const [page, words] = location.hash.replace(/^#\/?/, '').split('?')
  return { page: page || 'overview', words: new URLSearchParams(words ?? '') }
}

/** A word of the address as it is now: keys may come faster than pages are drawn. */
export const current = (name: string) => read().words.get(name)

const readers = new Set<() => void>()
window.addEventListener('hashchange', () => readers.forEach((each) => each()))

export function useRoute(): Route {
  const [route, setRoute] = useState(read)
  useEffect(() => {
    const reader = () => setRoute(read())
    readers.add(reader)
    return () => void readers.delete(reader)
  }, [])
  return route
}

export function link(page: string, words: Words): string {
  const found = new URLSearchParams()
  for (const [name, value] of Object.entries(words)) {
    if (Array.isArray(value)) value.forEach((each) => found.append(name, each))
    else if (value !== null && value !== '') found.set(name, String(value))
  }
  const text = found.toString()
  return `#/${page}${text ? '?' + text : ''}`
}

/** Changes some words of the address; in place, or as a step that the browser can go back. */
export function change(words: Words, isStep = false): void {
  const { page, words: now } = read()
  const all: Words = {}
  for (const name of now.keys()) all[name] = now.getAll(name)
  const target = link(page, { ...all, ...words })
  if (target === location.hash) return
  if (isStep) location.hash = target
  else {
    history.replaceState(null, '', target)
    readers.forEach((each) => each())
  }
}
