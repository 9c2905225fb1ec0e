// Package transports is the factory of the transports that come with kvstrata.
package transports

import (
	"kvstrata/connector"
	"kvstrata/connector/null"
)

// Default returns a factory that knows every transport of this module, by the names that kv_connector has. A program adds
// its own to it.
func Default() *connector.Factory {
	f := new(connector.Factory)
	for name, t := range map[string]connector.Transport{
		"null": null.Transport,
	} {
		if err := f.Register(name, t); err != nil {
			panic(err) // two of the names above are the same
		}
	}
	return f
}
