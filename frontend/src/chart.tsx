// One chart of Apache ECharts, in the page's colours, as large as its box.
import { BarChart, CustomChart, LineChart } from 'echarts/charts'
import { DataZoomComponent, GridComponent, TooltipComponent } from 'echarts/components'
import { init, use, type ECharts } from 'echarts/core'
import { CanvasRenderer } from 'echarts/renderers'
import { useEffect, useRef, useState } from 'preact/hooks'
import { tick, type Unit } from './format'

use([BarChart, CustomChart, LineChart, DataZoomComponent, GridComponent, TooltipComponent, CanvasRenderer])

// eslint-disable-next-line @typescript-eslint/no-explicit-any
export type Option = Record<string, any>
export const RUN_COLORS = ['--c0', '--c1', '--c2', '--c3', '--c4', '--c5', '--c6', '--c7']

const probe = document.createElement('span')
probe.hidden = true
document.body.append(probe)

/** The colour that a variable of the style sheet has in the theme of now. */
export function color(name: string, alpha = 1): string {
  probe.style.color = `var(${name})`
  const found = getComputedStyle(probe).color
  return alpha === 1 ? found : found.replace(/rgb\((.*)\)/, `rgba($1, ${alpha})`)
}

let theme = 0
const themed = new Set<() => void>()
export function themeChanged(): void {
  theme += 1
  themed.forEach((each) => each())
}
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', themeChanged)

export function useTheme(): number {
  const [, again] = useState(0)
  useEffect(() => {
    const listener = () => again((n) => n + 1)
    themed.add(listener)
    return () => void themed.delete(listener)
  }, [])
  return theme
}

export interface Row {
  color?: string
  label: string
  value: string
}

/** A tooltip made of elements, so that no text of a run is ever read as HTML. */
export function tip(title: string, rows: Row[]): HTMLElement {
  const box = document.createElement('div')
  box.className = 'tip'
  const head = document.createElement('div')
  head.className = 'tip-title'
  head.textContent = title
  box.append(head)
  for (const row of rows) {
    const line = document.createElement('div')
    line.className = 'tip-row'
    const dot = document.createElement('i')
    dot.style.background = row.color ?? 'transparent'
    const label = document.createElement('span')
    label.textContent = row.label
    const value = document.createElement('b')
    value.textContent = row.value
    line.append(dot, label, value)
    box.append(line)
  }
  return box
}

export function axes(x: Option, y: Option, xUnit: Unit, yUnit: Unit): Option {
  const label = { color: color('--dim'), fontSize: 11, fontFamily: 'Inter' }
  const line = { lineStyle: { color: color('--line') } }
  return {
    animation: false,
    textStyle: { fontFamily: 'Inter' },
    grid: { left: 8, right: 14, top: 12, bottom: 4, outerBoundsMode: 'same', outerBoundsContain: 'axisLabel' },
    tooltip: {
      trigger: 'axis',
      confine: true,
      padding: 0,
      borderWidth: 0,
      backgroundColor: 'transparent',
      extraCssText: 'box-shadow: none',
      axisPointer: { lineStyle: { color: color('--dim'), width: 1, type: 'solid' }, z: 0 },
    },
    xAxis: {
      type: 'value',
      axisLine: line,
      axisTick: { show: false },
      splitLine: { show: false },
      axisLabel: { ...label, hideOverlap: true, formatter: (v: number) => tick(v, xUnit) },
      min: 'dataMin',
      max: 'dataMax',
      ...x,
    },
    yAxis: {
      type: 'value',
      scale: true,
      splitNumber: 4,
      axisLine: { show: false },
      axisTick: { show: false },
      splitLine: line,
      axisLabel: { ...label, formatter: (v: number) => tick(v, yUnit) },
      ...y,
    },
  }
}

/** A horizontal axis of steps side by side, labelled at round numbers. */
export function stepAxis(steps: number[]): Option {
  const span = steps.length > 1 ? steps[steps.length - 1] - steps[0] : 0
  const stride = steps.length > 1 ? span / (steps.length - 1) : 1
  const wish = Math.max(span / 12, 1)
  const unit = 10 ** Math.floor(Math.log10(wish))
  const every = [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= wish) ?? 1
  return {
    type: 'category',
    data: steps,
    min: undefined,
    max: undefined,
    axisLabel: { color: color('--dim'), fontSize: 11, hideOverlap: true, interval: (_: number, step: string) => Number(step) % every < stride },
  }
}

export function Chart(props: {
  option: Option
  height: number
  label: string
  onClick?: (event: Option) => void
}) {
  const box = useRef<HTMLDivElement>(null)
  const chart = useRef<ECharts | null>(null)
  const click = useRef(props.onClick)
  click.current = props.onClick
  useEffect(() => {
    const made = init(box.current!, null, { renderer: 'canvas' })
    chart.current = made
    made.on('click', (event) => click.current?.(event as Option))
    const sizes = new ResizeObserver(() => made.resize())
    sizes.observe(box.current!)
    return () => {
      sizes.disconnect()
      made.dispose()
    }
  }, [])
  useEffect(() => chart.current?.setOption(props.option, { notMerge: true }), [props.option])
  return <div ref={box} class="chart" role="img" aria-label={props.label} style={{ height: `${props.height}px` }} />
}
