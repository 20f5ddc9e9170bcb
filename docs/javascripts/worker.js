// A page that is opened from a folder may start no worker; the search is one. There it runs in a frame of the page.
// See https://github.com/squidfunk/mkdocs-material/blob/master/docs/plugins/offline.md#limitations
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...scripts) =>
        scripts.reduce((before, src) => before.then(() => load(inside.document, src)), Promise.resolve());
      load(inside.document, url).then(() => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      });
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
    terminate() {
      this.frame.remove();
    }
  };
}

function load(page, src) {
  return new Promise((resolve, reject) => {
    const script = page.createElement("script");
    script.src = new URL(src, document.baseURI);
    script.onload = resolve;
    script.onerror = reject;
    page.body.append(script);
  });
}
