// The search runs in a worker, and browsers start none for a page that was opened from disk. There it runs in a hidden
// frame instead, with the same two functions: messages go in by postMessage and come out by onmessage.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.url = String(url)
      this.onmessage = null
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      const page = this.frame.contentWindow
      page.document.open()  // so that no later loading of the empty page throws away what is set below
      page.document.write("<!doctype html><html><head></head><body></body></html>")
      page.document.close()
      this.page = page
      // What the worker's script asks for: other scripts, and a place to send answers to.
      page.importScripts = (...urls) =>
        urls.reduce((before, one) => before.then(() => new Promise((done, failed) => {
          const script = page.document.createElement("script")
          script.src = String(one)
          script.onload = () => done()
          script.onerror = () => failed(new Error(`${one} was not loaded`))
          page.document.head.appendChild(script)
        })), Promise.resolve())
      page.postMessage = (data) => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      page.addEventListener("error", (event) => { if (this.onerror) this.onerror(event) })
      this.ready = page.importScripts(this.url)
    }
    postMessage(data) {
      this.ready = this.ready.then(() => this.page.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() { this.frame.remove() }
  }
}
