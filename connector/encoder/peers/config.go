package peers

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"

	"kvstrata/connector"
	"kvstrata/connector/encoder"
	"kvstrata/connector/tcp"
)

// Config is what the transport takes of ec_connector_extra_config beside what [tcp.Config] does.
type Config struct {
	Peers []string `json:"peers"` // host:port of producers that are asked for every item
}

// maxPeers bounds them: each is asked for each item.
const maxPeers = 256

// keys are the names of both, without those that mean nothing here: there is no push, and no memory to be mapped.
func keys() []string {
	return append([]string{"peers"}, slices.DeleteFunc(tcp.Keys(), func(key string) bool {
		return key == "mode" || key == "push_timeout" || key == "shared_memory"
	})...)
}

// read reads and validates both.
func read(extra connector.Extra) (peers []encoder.Place, cfg tcp.Config, err error) {
	rest, own := maps.Clone(extra), connector.Extra{}
	if rest == nil {
		rest = connector.Extra{}
	}
	if value, ok := rest["peers"]; ok {
		own["peers"] = value
		delete(rest, "peers")
	}
	var mine Config
	cfg = tcp.DefaultConfig()
	errs := []error{encoder.Strictly(own, &mine, "peers"), encoder.Strictly(rest, &cfg, tcp.Keys()...)}
	if err := errors.Join(errs...); err != nil {
		return nil, cfg, err
	}
	errs = []error{cfg.Validate()}
	if len(mine.Peers) > maxPeers {
		errs = append(errs, fmt.Errorf("peers: %d of them; want %d at most", len(mine.Peers), maxPeers))
	}
	for _, address := range mine.Peers {
		place, err := encoder.PlaceAt(address, "")
		if err != nil {
			errs = append(errs, fmt.Errorf("peers: %w", err))
		}
		if !slices.Contains(peers, place) {
			peers = append(peers, place)
		}
	}
	return peers, cfg, errors.Join(errs...)
}

// listenAt returns where a producer listens: where listen says, or at ec_ip and ec_port, any port where that is upstream's
// default.
func listenAt(c *encoder.Config, listen string) string {
	if listen != "" {
		return listen
	}
	port := c.Port
	if port == encoder.DefaultPort {
		port = 0
	}
	return net.JoinHostPort(c.IP, strconv.Itoa(port))
}

// check validates a setup's part.
func check(s encoder.Setup) error {
	_, _, err := read(s.Config.Extra)
	if s.Config.EngineID == "" {
		err = errors.Join(err, errors.New("engine_id: missing"))
	}
	return err
}
