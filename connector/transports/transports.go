// Package transports is the factory of the transports that come with kvstrata.
package transports

import (
	"time"

	"kvstrata/connector"
	"kvstrata/connector/direct"
	"kvstrata/connector/lmcache"
	"kvstrata/connector/null"
	"kvstrata/connector/redis"
	"kvstrata/connector/tcp"
)

// Default returns a factory that knows every transport of this module, by the names that kv_connector has. A program adds
// its own to it.
func Default() *connector.Factory {
	f := new(connector.Factory)
	for name, t := range map[string]connector.Transport{
		"null":    null.Transport,
		"tcp":     {NewScheduler: newTCPScheduler, NewWorker: tcp.NewWorker},
		"redis":   redis.Transport().Connector(),
		"lmcache": lmcache.Transport().Connector(),
	} {
		if err := f.Register(name, t); err != nil {
			panic(err) // two of the names above are the same
		}
	}
	return f
}

// newTCPScheduler makes the half in which consumers learn from the hand-off where their blocks are.
func newTCPScheduler(s connector.Setup) (connector.Scheduler, error) {
	cfg, err := tcp.ReadConfig(s.Config.Extra)
	if err != nil {
		return nil, err
	}
	return direct.NewScheduler(s, time.Duration(cfg.LeaseDuration*float64(time.Second)), cfg.Push()), nil
}
