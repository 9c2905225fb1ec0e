package server

import (
	"crypto/sha256"
	"encoding/base64"
	"html/template"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// loginPath is where the form of the login page goes. A browser can send no header with a page or a WebSocket, so a token
// opens a session, which a cookie holds. The token itself is in no URL and no cookie.
const loginPath = "/login"

// warnEvery is how often at most the log tells of refused logins, in seconds.
const warnEvery = 10

// loginStyle is all that the page looks like.
const loginStyle = `:root{color-scheme:light dark;font:16px/1.5 system-ui,sans-serif}
body{display:grid;place-content:center;min-height:100vh;margin:0;padding:1rem;box-sizing:border-box}
form{display:grid;gap:.75rem;width:min(24rem,90vw)}h1{font-size:1.25rem;margin:0}p{margin:0}
input,button{font:inherit;padding:.5rem .75rem;border:1px solid GrayText;border-radius:.375rem}
[role=alert]{color:#c33}`

var loginPage = template.Must(template.New("login").Parse(`<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Log in · kvstrata</title>
<link rel="icon" href="data:,">
<style>` + loginStyle + `</style>
<main>
<form method="post" action="` + loginPath + `">
<h1>kvstrata</h1>
<p><label for="token">This server wants one of its tokens.</label></p>
{{with .Problem}}<p role="alert">{{.}}</p>{{end}}
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus data-testid="login-token">
<input type="hidden" name="next" value="{{.Next}}">
<button data-testid="login">Log in</button>
</form>
</main>
</html>
`))

// loginPolicy lets the page have its style and send its form, and nothing else.
var loginPolicy = func() string {
	sum := sha256.Sum256([]byte(loginStyle))
	return "default-src 'none'; style-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'; img-src data:; " +
		"base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
}()

// wantsPage reports whether a person waits for the answer.
func wantsPage(r *http.Request) bool {
	return (r.Method == http.MethodGet || r.Method == http.MethodHead) && !strings.HasPrefix(r.URL.Path, "/v1/") &&
		strings.Contains(r.Header.Get("Accept"), "text/html")
}

// writeLogin asks for a token, to go on at next.
func writeLogin(w http.ResponseWriter, r *http.Request, next, problem string) {
	head := w.Header()
	head.Set("Content-Type", "text/html; charset=utf-8")
	head.Set("Cache-Control", "no-store")
	head.Set("Content-Security-Policy", loginPolicy)
	head.Set("X-Content-Type-Options", "nosniff")
	head.Set("Referrer-Policy", "no-referrer")
	head.Set("Cross-Origin-Opener-Policy", "same-origin")
	w.WriteHeader(http.StatusUnauthorized)
	if r.Method != http.MethodHead {
		_ = loginPage.Execute(w, struct{ Next, Problem string }{next, problem}) // the client is gone
	}
}

// openSession takes the form.
func (d *door) openSession(w http.ResponseWriter, r *http.Request) {
	if err := r.ParseForm(); err != nil {
		refuse(w, http.StatusBadRequest, "the form can't be read: send token")
		return
	}
	next := localPath(r.PostForm.Get("next"))
	token, ok := d.keys.find(strings.TrimSpace(r.PostForm.Get("token")))
	if !ok {
		if now, last := time.Now().Unix(), d.warned.Load(); now-last >= warnEvery && d.warned.CompareAndSwap(last, now) {
			d.log.Warn("a login was refused: not one of the tokens", "from", r.RemoteAddr)
		}
		writeLogin(w, r, next, "That is not one of this server’s tokens.")
		return
	}
	end := time.Now().Add(sessionTime)
	http.SetCookie(w, &http.Cookie{
		Name: sessionCookie(r), Value: newSession(token, end), Path: "/", MaxAge: int(sessionTime.Seconds()), HttpOnly: true,
		SameSite: http.SameSiteStrictMode, Secure: r.TLS != nil || r.Header.Get("X-Forwarded-Proto") == "https",
	})
	w.Header().Set("Cache-Control", "no-store")
	http.Redirect(w, r, next, http.StatusSeeOther)
}

// localPath returns a path of this server, and / for what is none, and for the form itself, which nobody wants to come back to.
func localPath(text string) string {
	u, err := url.Parse(text)
	if err != nil || u.IsAbs() || u.Host != "" || !strings.HasPrefix(text, "/") || strings.HasPrefix(text, "//") || u.Path == loginPath || strings.ContainsAny(text, "\\\r\n\t") {
		return "/"
	}
	return text
}
