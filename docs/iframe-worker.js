// A page opened from the disk may not start a worker, which the search needs: a hidden frame does its work there.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.ready = new Promise((done) => {
        this.frame.onload = () => {
          this.frame.onload = null;
          const inside = this.frame.contentWindow;
          inside.postMessage = (data) => setTimeout(() => this.hear(data));
          const script = inside.document.createElement("script");
          script.src = url;
          script.onload = done;
          inside.document.body.append(script);
        };
      });
      document.body.append(this.frame);
    }
    hear(data) {
      const message = new MessageEvent("message", { data });
      this.dispatchEvent(message);
      this.onmessage?.(message);
    }
    postMessage(data) {
      const copy = structuredClone(data);
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: copy })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
