// One chart of Apache ECharts, in the page's colours, as large as its box.
import { BarChart, CustomChart, LineChart } from 'echarts/charts'
import { DataZoomComponent, GridComponent, TooltipComponent } from 'echarts/components'
import { getInstanceByDom, init, use, type ECharts } from 'echarts/core'
import { CanvasRenderer } from 'echarts/renderers'
import { useEffect, useRef, useState } from 'preact/hooks'
import { spacing, tick, type Unit } from './format'

use([BarChart, CustomChart, LineChart, DataZoomComponent, GridComponent, TooltipComponent, CanvasRenderer])

// eslint-disable-next-line @typescript-eslint/no-explicit-any
export type Option = Record<string, any>
export const RUN_COLORS = Array.from({ length: 30 }, (_, n) => `--c${n}`)

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

/** The value of the vertical axis at which the pointer stands in a chart. */
export const pointer = { y: 0 }

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

/** Labels at the round numbers of a horizontal axis, which ends where its data does. */
export function along(min: number, max: number, unit: Unit): Option {
  const step = spacing(max - min, unit, 8)
  const first = Math.ceil(min / step - 1e-9)
  const count = Math.floor(max / step + 1e-9) - first + 1
  const customValues = Array.from({ length: count }, (_, n) => (first + n) * step)
  return { axisLabel: { customValues, formatter: (value: number) => tick(value, unit, step) } }
}

/** The ends and labels of a vertical axis, all at round numbers; one value alone stands over 0. */
export function upward(min: number, max: number, unit: Unit, count: number): Option {
  const [low, high] = max > min ? [min, max] : max ? [Math.min(max, 0), Math.max(max, 0)] : [0, 1]
  const interval = spacing(high - low, unit, count)
  const end = (n: number) => +(n * interval).toPrecision(12)
  return {
    interval,
    min: end(Math.floor(low / interval + 1e-9)),
    max: end(Math.ceil(high / interval - 1e-9)),
    axisLabel: { formatter: (value: number) => tick(value, unit, interval) },
  }
}

/** Axes over the ranges of the data, `min` to `max` of both; those with a `type` have no range. */
export function axes(x: Option, y: Option, xUnit: Unit, yUnit: Unit, count = 4): Option {
  const label = { color: color('--dim'), fontSize: 11, fontFamily: 'Inter' }
  const line = { lineStyle: { color: color('--line') } }
  const vertical = upward(y.min, y.max, yUnit, count)
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
      ...x,
      axisLabel: { ...label, hideOverlap: true, ...(x.type ? x : along(x.min, x.max, xUnit)).axisLabel },
    },
    yAxis: {
      type: 'value',
      axisLine: { show: false },
      axisTick: { show: false },
      splitLine: line,
      ...y,
      ...(y.type ? {} : vertical),
      axisLabel: { ...label, ...(y.type ? y : vertical).axisLabel },
    },
  }
}

/** A horizontal axis of steps side by side, `every` of them in a place, labelled at round numbers. */
export function stepAxis(steps: number[], every: number): Option {
  const unit = spacing(Math.max(steps[steps.length - 1] - steps[0], 1), 'count', 12)
  const multiple = (step: number) => Math.floor(step / unit)
  return {
    type: 'category',
    data: steps,
    axisLabel: {
      interval: (n: number) => multiple(steps[n]) > multiple(n ? steps[n - 1] : steps[0] - every),
      formatter: (step: string) => (every > 1 ? String(multiple(Number(step)) * unit) : step),
    },
  }
}

/** Hands the reader a file that was made here. */
export function save(name: string, content: Blob): void {
  const made = document.createElement('a')
  made.href = URL.createObjectURL(content)
  made.download = name
  made.click()
  setTimeout(() => URL.revokeObjectURL(made.href), 10_000)
}

/** Saves the chart of a panel as a picture, with its title above and what its colours mean below. */
export function savePicture(panel: Element, title: string, items: { color: string; label: string }[]): void {
  const chart = getInstanceByDom(panel.querySelector<HTMLElement>('.chart')!)!.renderToCanvas({ pixelRatio: 2 })
  const columns = Math.max(Math.floor(chart.width / 560), 1)
  const made = document.createElement('canvas')
  made.width = chart.width
  made.height = chart.height + 68 + 36 * Math.ceil(items.length / columns)
  const pen = made.getContext('2d')!
  pen.fillStyle = color('--panel')
  pen.fillRect(0, 0, made.width, made.height)
  pen.drawImage(chart, 0, 56)
  pen.fillStyle = color('--ink')
  pen.font = '600 26px Inter'
  pen.fillText(title, 20, 38)
  pen.font = '22px Inter'
  items.forEach((each, n) => {
    const [x, y] = [20 + (n % columns) * 560, chart.height + 88 + 36 * Math.floor(n / columns)]
    pen.fillStyle = each.color
    pen.fillRect(x, y - 17, 18, 18)
    pen.fillStyle = color('--dim')
    pen.fillText(each.label, x + 28, y)
  })
  made.toBlob((content) => content && save(`${title}.png`, content))
}

export function Chart(props: {
  option: Option
  height: number
  label: string
  onClick?: (event: Option) => void
  /** What changes in the option when a part of the horizontal axis is shown. */
  onZoom?: (from: number, to: number) => Option
}) {
  const box = useRef<HTMLDivElement>(null)
  const chart = useRef<ECharts | null>(null)
  const click = useRef(props.onClick)
  click.current = props.onClick
  const zoom = useRef(props.onZoom)
  zoom.current = props.onZoom
  useEffect(() => {
    const made = init(box.current!, null, { renderer: 'canvas' })
    chart.current = made
    made.getZr().on('mousemove', ({ offsetX, offsetY }) => { pointer.y = made.convertFromPixel({ gridIndex: 0 }, [offsetX, offsetY])?.[1] ?? 0 })
    made.on('click', (event) => click.current?.(event as Option))
    made.on('datazoom', () => {
      const { startValue, endValue } = (made.getOption().dataZoom as Option[])[0]
      if (zoom.current) made.setOption(zoom.current(startValue, endValue))
    })
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
