// Browsers start no worker from a file, and the search is one: here it runs in a hidden frame of the same page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.frame = frame;
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const load = (address) =>
        new Promise((loaded, failed) => {
          const script = inside.document.createElement("script");
          script.src = address;
          script.onload = loaded;
          script.onerror = failed;
          inside.document.body.append(script);
        });
      const here = new URL(url, location.href);
      inside.importScripts = (...urls) =>
        urls.reduce((done, next) => done.then(() => load(new URL(next, here))), Promise.resolve());
      this.ready = load(here);
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
